"""A real Slurm of two nodes on this machine: its own configuration, munge key, ports and folder; stopped by process id."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("n1", "n2")
CPUS = 8  # of each node, whatever the machine has: four jobs of these tests at once, and the others wait
MEMORY_MB = 100_000
FINAL = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(f"/usr/sbin/{name}")


class SlurmCluster:
    """Started by `start`, stopped by `stop`."""

    def __init__(self, pyxis: Path | None = None) -> None:
        """
        Args:
            pyxis: the SPANK plugin; `srun` then starts containers, by the `enroot` on PATH.
        """
        self.pyxis = pyxis
        self.folder = Path(tempfile.mkdtemp(prefix="slurm_", dir="/tmp"))  # short: it holds sockets
        self.processes: list[subprocess.Popen] = []
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        folder = self.folder
        (folder / "munge").mkdir(mode=0o711)
        key = folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for name in ("state", "n1", "n2"):
            (folder / name).mkdir()
        folder.chmod(0o755)
        self._write_configuration()
        socket_ = folder / "munge/socket"
        self._spawn(
            "munged", "--foreground", "--force", f"--socket={socket_}", f"--key-file={key}", f"--pid-file={folder}/munge/pid",
            f"--seed-file={folder}/munge/seed", "--num-threads=4",
        )  # fmt: skip
        self.until(socket_.exists, "munged's socket", 60)
        self._spawn("slurmctld", "-D", "-i")
        self.until(lambda: "UP" in self._run("scontrol", "ping").stdout, "slurmctld", 120)
        for node in NODES:
            self._spawn("slurmd", "-D", "-N", node, path=self._containers(node) if self.pyxis else None)
        self.until(lambda: self._run("sinfo", "-h", "-o", "%t %D").stdout.split() == ["idle", "2"], "two idle nodes", 120)

    def _write_configuration(self) -> None:
        control, first, second = free_ports(3)
        host = socket.gethostname().split(".")[0]
        lines = [
            "ClusterName=trtrltest",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            # A requeued job waits until its old credential has expired, two minutes unless said otherwise.
            f"AuthInfo=socket={self.folder}/munge/socket,cred_expire=10",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU_Memory",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "AccountingStorageType=accounting_storage/none",
            # Memory is polled, and a job over its limit killed: enforcement without cgroups.
            "JobAcctGatherType=jobacct_gather/linux",
            "JobAcctGatherFrequency=task=2",
            "JobAcctGatherParams=OverMemoryKill",
            "DefMemPerNode=20000",
            "ReturnToService=2",
            "KillWait=15",
            f"FirstJobId={random.randrange(1000, 60_000)}",  # it decides Ray's ports: another run of these tests has others
            "MinJobAge=3600",  # ended jobs stay visible
            "SlurmdTimeout=600",  # a busy machine is no failed node
            "MessageTimeout=60",
            "SchedulerParameters=sched_interval=5,batch_sched_delay=0",
        ]
        for node, port in zip(NODES, (first, second), strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory={MEMORY_MB} State=UNKNOWN"
            )
        lines.append(f"PartitionName=test Nodes={','.join(NODES)} Default=YES OverSubscribe=NO State=UP MaxTime=60")
        if self.pyxis:
            lines.append(f"PlugStackConfig={self.folder}/plugstack.conf")
            (self.folder / "plugstack.conf").write_text(f"required {self.pyxis} runtime_path={self.folder}/pyxis\n")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def root_filesystems(self, node: str) -> Path:
        """Where enroot keeps a node's containers. Each node has a folder, because both would give theirs the same name."""
        return self.folder / node / "containers"

    def _containers(self, node: str) -> str:
        """PATH for a node's slurmd, of which pyxis keeps nothing else of the environment."""
        program = self.folder / node / "bin/enroot"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nENROOT_DATA_PATH={self.root_filesystems(node)} exec {shutil.which("enroot")} "$@"\n')
        program.chmod(0o755)
        return f"{program.parent}:{os.environ['PATH']}"

    def _spawn(self, program: str, *arguments: str, path: str | None = None) -> None:
        log = (self.folder / f"{program}{len(self.processes)}.log").open("w")
        environment = self.environment | ({"PATH": path} if path else {})
        self.processes.append(
            subprocess.Popen([_program(program), *arguments], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        )

    def _run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)

    def until(self, holds: Callable[[], object], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            for process in self.processes:
                assert process.poll() is None, f"{process.args[0]} ended:\n{self.logs()}"
            assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s:\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    @staticmethod
    def cannot_start() -> str | None:
        """Why not, on this machine."""
        if os.geteuid() != 0:
            return "its daemons need root, to run jobs as their users"
        lacking = [p for p in ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel") if not _program(p)]
        if lacking:
            return f"{', '.join(lacking)} not installed; `bash tests/run.sh --slurm` installs them on Debian and Ubuntu"
        return None

    # --- jobs -----------------------------------------------------------------------------------------------------

    def show(self, job: str) -> dict[str, str]:
        """Slurm's own description of a job."""
        text = self._run("scontrol", "show", "job", "--oneliner", job).stdout
        return dict(item.partition("=")[::2] for item in text.split() if "=" in item)

    def state(self, job: str) -> str:
        return self.show(job).get("JobState", "")

    def wait(self, job: str, seconds: float = 300) -> dict[str, str]:
        """Until the job has ended for good; its description."""
        self.until(lambda: self.state(job) in FINAL, f"the end of job {job} ({self.state(job)})", seconds)
        return self.show(job)

    def cancel(self, job: str, *options: str) -> None:
        done = self._run("scancel", *options, job)
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        if self.processes:
            self._run("scancel", "--user=root", "--state=RUNNING")
            self._run("scancel", "--user=root", "--state=PENDING")
            deadline = time.monotonic() + 40
            while self._run("squeue", "-h").stdout.strip() and time.monotonic() < deadline:
                time.sleep(0.3)
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
