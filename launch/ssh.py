"""A run on hosts that ssh reaches: this process holds one connection to each, and a host that loses it stops what it runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from launch.hosts import FIRST_PORT, Host, LaunchError, environment_problems

DEFAULT = "ssh -o BatchMode=yes -o ServerAliveInterval=15"


@dataclass(frozen=True)
class SshJob:
    hosts: tuple[Host, ...]
    gpus_per_node: int
    launch_folder: Path
    workdir: Path
    driver: tuple[str, ...]
    python: str
    cpus_per_node: int | None = None
    paths: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    ready_timeout_s: float = 600.0
    first_port: int = FIRST_PORT
    ip_version: int | None = None
    object_store_bytes: int | None = None
    ssh: tuple[str, ...] = tuple(DEFAULT.split())
    job: int = field(default_factory=lambda: random.SystemRandom().randrange(1, 10**6))
    """In place of a scheduler's number: decides the ports."""

    @property
    def logs(self) -> Path:
        return self.launch_folder / f"ssh.{self.job}"

    @property
    def first_line(self) -> bytes:
        """Of every process's standard input, what --env was given: values may be secrets, and every user of a host can read
        command lines."""
        return json.dumps(dict(pair.split("=", 1) for pair in self.environment)).encode() + b"\n" if self.environment else b""

    def problems(self) -> list[str]:
        values = [str(self.launch_folder), str(self.workdir), self.python, *self.driver, *self.paths, *self.environment]
        found = [f"{v!r} holds NUL, which no command line can carry" for v in values if "\0" in v]
        found += [f"host {host.name!r} begins with a dash, which ssh would read as an option" for host in self.hosts if host.name[0] == "-"]
        found += environment_problems(self.environment)
        if self.ip_version not in (None, 4, 6):
            found.append(f"--ip-version = {self.ip_version}; works: 4, 6")
        if not self.ssh or shutil.which(self.ssh[0]) is None:
            found.append(f"--ssh {shlex.join(self.ssh)!r}: no such program here; install an ssh client")
        return found

    def on(self, host: Host, role: str, *arguments: str) -> list[str]:
        """A command line that runs `launch.ray_cluster` there. ssh gives its arguments to a shell, so they are quoted once more."""
        names = {k: v for k, v in os.environ.items() if k.startswith("NCCL_") or k in ("PYTHONPATH", "GLOO_SOCKET_IFNAME")}
        hosts = ",".join(f"{h.name}={h.address}" for h in self.hosts)
        program = ["env", *(f"{k}={v}" for k, v in sorted(names.items())), self.python, "-m", "launch.ray_cluster", role]
        program += ["--hosts", hosts, "--me", host.name, "--job", str(self.job), "--first-port", str(self.first_port)]
        program += [*(["--environment-on-stdin"] if self.environment else []), *arguments]
        return [*self.ssh, host.name, f"cd {shlex.quote(str(self.workdir))} && exec {shlex.join(program)}"]

    def checks(self) -> dict[str, list[str]]:
        more = [f"--gpus={self.gpus_per_node}", *(f"--path={path}" for path in self.paths)]
        return {host.name: self.on(host, "check", *more) for host in self.hosts}

    def address(self) -> list[str]:
        return self.on(self.hosts[0], "address", *([f"--ip-version={self.ip_version}"] if self.ip_version else []))

    def nodes(self, address: str) -> dict[str, list[str]]:
        """By host, the head first."""
        common = [
            "--address",
            address,
            "--gpus",
            str(self.gpus_per_node),
            "--logs",
            str(self.logs),
            "--deadline",
            f"{self.ready_timeout_s:g}",
        ]
        common += [f"--cpus={self.cpus_per_node}"] if self.cpus_per_node else []
        common += [f"--object-store-bytes={self.object_store_bytes}"] if self.object_store_bytes else []
        first, *others = self.hosts
        head = {first.name: self.on(first, "head", *common, "--while-stdin", "--", *self.driver)}
        return head | {host.name: self.on(host, "worker", *common, "--while-stdin") for host in others}

    def commands(self) -> list[list[str]]:
        """Everything that would be run, for a reader."""
        if found := self.problems():
            raise LaunchError.of("the run cannot be launched", found)
        return [*self.checks().values(), self.address(), *self.nodes("ADDRESS").values()]

    def run(self) -> int:
        """Check every host, start Ray and the driver, and return the driver's exit code. Ctrl-C and SIGTERM end the run
        after its step, with a checkpoint; the second only stops waiting for that, the hosts finish by themselves.

        Raises:
            LaunchError: a host lacks something; nothing was started.
        """
        self.commands()
        self._check()
        found = self._asked(self.address())
        lines = found.stdout.strip().splitlines()  # a login shell may say something first
        if found.returncode or not lines:
            raise LaunchError(f"{self.hosts[0].name}: {found.stderr.strip() or 'said nothing where its address was asked'}")
        started = {name: _start(command, self.first_line) for name, command in self.nodes(lines[-1].split()[0]).items()}
        head = started[self.hosts[0].name]
        try:
            return self._wait(head)
        finally:
            for process in started.values():  # closing standard input is what asks a host to stop
                process.stdin.close()
            for process in started.values():
                _let_end(process)

    def _asked(self, command: list[str]) -> subprocess.CompletedProcess:
        limit_s = self.ready_timeout_s
        try:
            said = self.first_line.decode()
            return subprocess.run(command, capture_output=True, text=True, check=False, input=said, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer within {limit_s:g} s (--ready-timeout)")

    def _check(self) -> None:
        """All at once, because each waits for its network."""
        done: dict[str, subprocess.CompletedProcess] = {}

        def check(name: str, command: list[str]) -> None:
            done[name] = self._asked(command)

        threads = [threading.Thread(target=check, args=item) for item in self.checks().items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = []
        for host in self.hosts:
            result = done[host.name]
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            if result.returncode:
                own = [line for line in lines if line.startswith(f"{host.name}: ")]
                found += own or [f"{host.name}: {lines[-1] if lines else f'exit code {result.returncode}'} (is it reached by ssh?)"]
        if found:
            raise LaunchError.of("nothing was started", found)

    def _wait(self, head: subprocess.Popen) -> int:
        asked = 0

        def ask(number, frame) -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                head.stdin.close()
            else:
                head.terminate()

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while head.poll() is None:
                time.sleep(0.1)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return head.returncode if head.returncode >= 0 else 128 - head.returncode


def _start(command: list[str], first_line: bytes) -> subprocess.Popen:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is ours to pass on
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which its exit code tells
        process.stdin.write(first_line)
        process.stdin.flush()
    return process


def _let_end(process: subprocess.Popen) -> None:
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
