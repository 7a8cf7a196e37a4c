"""One Ray cluster for one job, wherever its nodes come from: `python -m launch.ray_cluster {check,address,head,worker}`.

Each node runs a `head` or `worker` process, which starts Ray, and stops what it started. The head also waits until every node
has joined, runs the driver and ends with its exit code. Nodes tell what became of them in files of a shared folder,
so that the head's error can say why a node is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.hosts import (
    FIRST_PORT,
    Host,
    LaunchError,
    Ports,
    address_towards,
    answers,
    clean_environment,
    head_address,
    joined,
    ports_of,
    problems_here,
)

_MARK = "trt_rl.host."  # a resource of every node, by which nodes of one machine can be told apart
_STOP = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.2
_FAILED = "failed: "
_ATTEMPTS = 5  # `ray start` gives its own processes 30 s, which a busy machine or a slow file system can exceed
_DRAIN = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # the driver has ended, and Slurm waits seconds only (KillWait)
_WITHOUT_RAY_S = 60.0  # for a driver to notice that its cluster has ended
INTERRUPTED = 128 + signal.SIGTERM
"""Exit code of a head that was asked to stop before there was a driver. A driver that has saved ends with 130."""


@dataclass(frozen=True)
class Cluster:
    hosts: tuple[Host, ...]
    me: str
    job: int
    first_port: int
    address: str
    """Of the head, without port."""
    cpus: int | None
    gpus: int
    object_store_bytes: int | None
    logs: Path
    deadline_s: float

    @property
    def ports(self) -> Ports:
        return ports_of(self.hosts, self.me, self.job, self.first_port)

    @property
    def gcs(self) -> tuple[str, int]:
        return self.address, ports_of(self.hosts, self.hosts[0].name, self.job, self.first_port).gcs

    @property
    def is_head(self) -> bool:
        return self.me == self.hosts[0].name

    def authentication(self) -> dict[str, str]:
        """Environment of everything that speaks to this cluster: whoever may open the job's folder of logs may use it, other
        users of these machines may not. Ray before 2.52 knows no tokens and ignores this."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}

    @property
    def token(self) -> Path:
        return self.logs / "ray_token"

    def tell(self, state: str) -> None:
        """What this node does, for the head to read."""
        file = self.logs / f"{self.me}.state"
        file.with_suffix(".new").write_text(state)
        file.with_suffix(".new").rename(file)

    def told(self) -> dict[str, str]:
        files = {host.name: self.logs / f"{host.name}.state" for host in self.hosts}
        return {name: file.read_text() for name, file in files.items() if file.is_file()}


class Node:
    """Ray on this machine, from entering to leaving. Everything it starts is in a session of its own, so that signals for us do
    not reach it, and is stopped by it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.log = cluster.logs / f"{cluster.me}.log"

    def __enter__(self) -> Node:
        # Not under TMPDIR: the paths of Ray's sockets below this must stay under 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix=f"trt_rl_{self.cluster.job}_", dir="/tmp"))
        if self.cluster.is_head and not self.cluster.token.exists():
            with open(os.open(self.cluster.token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        environment = clean_environment() | self.cluster.authentication() | _DRAIN
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command(), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def command(self) -> list[str]:
        """`ray start` with every port said."""
        cluster, ports = self.cluster, self.cluster.ports
        own = cluster.address if cluster.is_head else address_towards(cluster.address)
        # Ray's own script; `ray` need not be on PATH.
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", f"--node-ip-address={own}"]
        if cluster.is_head:
            command += ["--head", f"--port={ports.gcs}", f"--ray-client-server-port={ports.client}"]
            command += ["--include-dashboard=false", f"--dashboard-port={ports.dashboard}"]
        else:
            command += [f"--address={joined(*cluster.gcs)}"]
        command += [f"--node-manager-port={ports.node_manager}", f"--object-manager-port={ports.object_manager}"]
        command += [f"--dashboard-agent-listen-port={ports.agent_http}", f"--dashboard-agent-grpc-port={ports.agent_grpc}"]
        command += [f"--runtime-env-agent-port={ports.runtime_env_agent}", f"--metrics-export-port={ports.metrics}"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]  # the kernel's choice; by default all jobs draw from one range
        command += [f"--num-gpus={cluster.gpus}", f"--resources={json.dumps({_MARK + cluster.me: 1})}", f"--temp-dir={self.folder}"]
        command += [f"--num-cpus={cluster.cpus}"] if cluster.cpus else []
        command += [f"--object-store-memory={cluster.object_store_bytes}"] if cluster.object_store_bytes else []
        return command

    def ended(self) -> str:
        """Why Ray is no longer there; empty while it is."""
        code = self.process.poll()
        return "" if code is None else f"`ray start` ended with exit code {code}: {last_line(self.log)} (see {self.log})"

    def __exit__(self, kind, error, trace) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Ray leaves its agents behind. All that it started is in the group that we made for it, and nobody else is.
        for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 0.0)):
            deadline = time.monotonic() + patience_s
            while _signal_group(self.process.pid, number) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        for logs in self.folder.glob("session_*/logs"):
            if not logs.parent.is_symlink():
                shutil.copytree(logs, self.cluster.logs / f"{self.cluster.me}.ray", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anybody in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


class Stop:
    """Signals that ask this process to end."""

    def __init__(self) -> None:
        self.count = 0
        for number in _STOP:
            signal.signal(number, self._ask)

    def _ask(self, number, frame) -> None:
        self.count += 1


def run_worker(cluster: Cluster, while_stdin: bool) -> int:
    """Ray on a node that is not the head, until asked to stop."""
    stop, deadline = Stop(), time.monotonic() + cluster.deadline_s

    def asked() -> bool:
        return bool(stop.count) or (while_stdin and _closed(sys.stdin))

    head = joined(*cluster.gcs)
    for attempt in range(1, _ATTEMPTS + 1):
        cluster.tell(f"waiting for the head: nothing answers at {head} yet")
        while not (cluster.token.is_file() and answers(*cluster.gcs)):
            if asked():
                return 0
            if time.monotonic() > deadline:
                cluster.tell(
                    f"{_FAILED}nothing answered at {head} within {cluster.deadline_s:.0f} s; is there a firewall between the nodes?"
                )
                return 1
            time.sleep(_POLL_S)
        cluster.tell(f"the head answers at {head}; Ray was started (attempt {attempt}), it writes to {cluster.logs / cluster.me}.log")
        with Node(cluster) as node:
            while not (asked() or node.ended()):
                time.sleep(_POLL_S)
            if asked():
                return 0
            print(f"{cluster.me}: {node.ended()}", file=sys.stderr)
            if attempt == _ATTEMPTS or time.monotonic() > deadline:
                cluster.tell(_FAILED + node.ended())
                return 1
    return 1


def run_head(cluster: Cluster, command: list[str], while_stdin: bool) -> int:
    """Ray on this node, the other nodes' arrival, then `command`, whose exit code this returns.

    What asks this to stop, asks the command with SIGTERM: a training run finishes its step and saves. So does every further
    signal. Those are not Slurm's way of asking for a checkpoint: they reach every process of a step, Ray's included.
    """
    stop, deadline = Stop(), time.monotonic() + cluster.deadline_s
    for attempt in range(1, _ATTEMPTS + 1):
        with Node(cluster) as node:
            code = _until_complete(cluster, node, lambda: bool(stop.count) or (while_stdin and _closed(sys.stdin)))
            if code == 0:
                driver = _child(command, cluster.authentication() | {"RAY_ADDRESS": joined(*cluster.gcs)})
                try:
                    return _drive(driver, stop, node, while_stdin)
                finally:
                    _end(driver)
            again = bool(node.ended()) and code == 2 and attempt < _ATTEMPTS and time.monotonic() < deadline
        if not again:
            break
    return code


def _until_complete(cluster: Cluster, node: Node, asked: Callable[[], bool]) -> int:
    """0 once every node has joined."""
    watcher = _child([sys.executable, "-m", "launch.ray_cluster", "watch", *watch_arguments(cluster)], cluster.authentication())
    try:
        while watcher.poll() is None:
            if asked():
                print("stopped before the driver was started", file=sys.stderr)
                return INTERRUPTED
            if why := node.ended():
                print(f"error: the head {cluster.me}: {why}", file=sys.stderr)
                return 2
            time.sleep(_POLL_S)
    finally:
        _end(watcher)
    return 2 if watcher.returncode else 0


def _drive(driver: subprocess.Popen, stop: Stop, node: Node, while_stdin: bool) -> int:
    passed_on, lost_at = 0, 0.0
    while driver.poll() is None:
        if while_stdin and not stop.count and _closed(sys.stdin):
            stop.count = 1
        while passed_on < stop.count:
            passed_on += 1
            driver.send_signal(signal.SIGTERM)
        if not lost_at and (why := node.ended()):
            lost_at = time.monotonic()
            print(f"error: Ray on the head ended while the driver ran: {why}", file=sys.stderr)
            driver.terminate()
        if lost_at and time.monotonic() > lost_at + _WITHOUT_RAY_S:
            break  # it waits for processes that are gone; whoever called ends it
        time.sleep(_POLL_S)
    code = 1 if driver.returncode is None else driver.returncode
    if code == -signal.SIGKILL:
        print("error: the driver was killed by SIGKILL, as the kernel does when memory runs out (see dmesg, sacct MaxRSS)", file=sys.stderr)
    return 128 - code if code < 0 else code


def watch(cluster: Cluster) -> int:
    """Wait until every node has joined with what it should bring; a process of its own, because Ray takes over signals."""
    import ray
    from ray.exceptions import RayError

    deadline, seen = time.monotonic() + cluster.deadline_s, {}
    while True:
        if failed := {name: told for name, told in cluster.told().items() if told.startswith(_FAILED)}:
            print("error: " + "; ".join(f"node {name}: {told.removeprefix(_FAILED)}" for name, told in failed.items()), file=sys.stderr)
            return 2
        if not ray.is_initialized() and answers(*cluster.gcs):
            try:
                ray.init(address=joined(*cluster.gcs), log_to_driver=False, logging_level="critical", configure_logging=False)
            except (ConnectionError, RuntimeError, RayError):  # the head is there, its raylet is not yet
                time.sleep(_POLL_S)
        nodes = {name: node for node in ray.nodes() if node["Alive"] and (name := _name_of(node))} if ray.is_initialized() else {}
        if nodes.keys() != seen.keys():
            print(f"Ray at {joined(*cluster.gcs)}: {len(nodes)} of {len(cluster.hosts)} nodes", flush=True)
            seen = nodes
        lacking = missing(cluster, nodes)
        if not lacking:
            for name, node in sorted(nodes.items()):
                print(f"  {name}: {node['NodeManagerAddress']}, Ray node {node['NodeID']}, {_brings(node)}")
            ray.shutdown()
            return 0
        if time.monotonic() > deadline:
            problems = "\n".join(f"  - {line}" for line in lacking)
            print(
                f"error: the Ray cluster was not complete after {cluster.deadline_s:.0f} s (--ready-timeout):\n{problems}", file=sys.stderr
            )
            return 2
        time.sleep(_POLL_S)


def missing(cluster: Cluster, nodes: dict[str, dict]) -> list[str]:
    """What the cluster lacks, by name of the host."""
    found, told = [], cluster.told()
    for host in cluster.hosts:
        if host.name not in nodes:
            state = told.get(host.name, "it has not started, or does not share the folder of logs")
            found.append(f"{host.name} ({host.address}) did not join; {'Ray did not come up' if host == cluster.hosts[0] else state}")
            continue
        have = nodes[host.name]["Resources"]
        for kind, need in (("GPU", cluster.gpus), ("CPU", cluster.cpus or 0)):
            if have.get(kind, 0) < need:
                found.append(f"{host.name} joined with {have.get(kind, 0):.0f} of {need} {kind}s")
    return found


def _name_of(node: dict) -> str:
    return next((key.removeprefix(_MARK) for key in node["Resources"] if key.startswith(_MARK)), "")


def _brings(node: dict) -> str:
    return ", ".join(f"{node['Resources'].get(kind, 0):.0f} {kind}s" for kind in ("GPU", "CPU"))


def last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()] if file.is_file() else []
    return lines[-1] if lines else "no output"


def _child(command: list[str], more: dict[str, str]) -> subprocess.Popen:
    try:
        return subprocess.Popen(command, env=clean_environment() | more, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise LaunchError(f"the driver {command[0]!r} cannot be started: {error.strerror}; name a program of the nodes") from error


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _closed(stream) -> bool:
    return bool(select.select([stream], [], [], 0)[0]) and not os.read(stream.fileno(), 4096)


def watch_arguments(cluster: Cluster) -> list[str]:
    hosts = ",".join(f"{host.name}={host.address}" for host in cluster.hosts)
    given = ["--hosts", hosts, "--me", cluster.me, "--job", str(cluster.job), "--first-port", str(cluster.first_port)]
    given += ["--address", cluster.address, "--gpus", str(cluster.gpus), "--logs", str(cluster.logs), "--deadline", str(cluster.deadline_s)]
    return given + (["--cpus", str(cluster.cpus)] if cluster.cpus else [])


_ENVIRONMENT = "--environment-on-stdin"


def _take_environment() -> None:
    """Begin anew with the variables in the first line of standard input, JSON: the interpreter reads some of them itself."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):  # one at a time: what follows is for later
            sys.exit(f"error: {_ENVIRONMENT}: standard input ended before the line of variables")
        line += byte
    own = [argument for argument in sys.argv[1:] if argument != _ENVIRONMENT]
    os.execve(sys.executable, [sys.executable, "-m", "launch.ray_cluster", *own], os.environ | json.loads(line))


def _where(hosts: tuple[Host, ...], given: argparse.Namespace) -> str:
    """The head's address, and Ray's there."""
    address = head_address(hosts, given.ip_version)
    return f"{address} {joined(address, ports_of(hosts, hosts[0].name, given.job, given.first_port).gcs)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.ray_cluster", description=__doc__)
    parser.add_argument("role", choices=("check", "address", "head", "worker", "watch"))
    parser.add_argument("--hosts", required=True, help="a,b or a=ADDRESS,b=ADDRESS; the first is the head")
    parser.add_argument("--me", default=os.environ.get("SLURMD_NODENAME", ""), help="this host's name among them")
    parser.add_argument("--job", type=int, required=True, help="number of the job; it decides the ports")
    parser.add_argument("--first-port", type=int, default=FIRST_PORT)
    parser.add_argument("--ip-version", type=int, choices=(4, 6))
    parser.add_argument("--address", default="", help="of the head")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--object-store-bytes", type=int)
    parser.add_argument("--logs", type=Path, help="folder that all nodes share; needed to start Ray")
    parser.add_argument("--deadline", type=float, default=600.0)
    parser.add_argument("--path", action="append", default=[], help="must exist, repeatable")
    parser.add_argument(
        "--while-stdin", action="store_true", help="stop when standard input closes: what started this has ended, or asks for it"
    )
    own, driver = arguments, []
    if "--" in arguments:  # what follows is the driver's command line
        own, driver = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    given = parser.parse_args(own)
    if given.role == "head" and not driver:
        parser.error("head needs the driver's command after --")
    if given.logs is None and given.role not in ("check", "address"):
        parser.error(f"{given.role} needs --logs")
    try:
        hosts = Host.parse(given.hosts)
        if given.role == "address":
            print(_where(hosts, given))
            return 0
        if given.role == "check":
            found = problems_here(ports_of(hosts, given.me, given.job, given.first_port), given.path, given.gpus)
            for problem in found:
                print(f"{given.me}: {problem}", file=sys.stderr)
            if given.logs:
                given.logs.mkdir(parents=True, exist_ok=True)
                (given.logs / f"{given.me}.state").write_text(
                    "it lacks something" if found else "it passed the checks, then nothing was heard of it"
                )
                if given.me == hosts[0].name:
                    (given.logs / "address").write_text(_where(hosts, given) + "\n")
            return 2 if found else 0
        cluster = Cluster(
            hosts, given.me, given.job, given.first_port, given.address, given.cpus, given.gpus, given.object_store_bytes,
            given.logs, given.deadline,
        )  # fmt: skip
        if given.role == "watch":
            return watch(cluster)
        cluster.logs.mkdir(parents=True, exist_ok=True)
        return run_worker(cluster, given.while_stdin) if given.role == "worker" else run_head(cluster, driver, given.while_stdin)
    except LaunchError as error:
        print(f"error: {given.me + ': ' if given.me else ''}{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if _ENVIRONMENT in sys.argv[: sys.argv.index("--") if "--" in sys.argv else None]:
        _take_environment()
    sys.exit(main(sys.argv[1:]))
