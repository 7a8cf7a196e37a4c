"""Runs over a real sshd on this machine, whose two "hosts" are both this machine: IPv4, and IPv6 where there is an address."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import free_ports

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """Command line of an ssh client that reaches n1 and n2."""
    server = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
    if os.geteuid() != 0 or server is None or shutil.which("ssh") is None:
        pytest.skip("no sshd can be started here: root and openssh-server are needed; `bash tests/run.sh --slurm` installs it")
    folder, (port,) = tmp_path_factory.mktemp("ssh"), free_ports(1)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    options = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none", "PasswordAuthentication": "no", "StrictModes": "no", "UsePAM": "no",
    }  # fmt: skip
    (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in options.items()))
    client = f"Host n1 n2\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/user\n StrictHostKeyChecking no\n"
    (folder / "config").write_text(client + f" UserKnownHostsFile {folder}/known\n BatchMode yes\n LogLevel ERROR\n")
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd confines its unprivileged half
    log = (folder / "log").open("w")
    process = subprocess.Popen([server, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log)
    command = ["ssh", "-F", str(folder / "config")]
    deadline = time.monotonic() + 60
    while subprocess.run([*command, "n1", "true"], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline and process.poll() is None, (folder / "log").read_text()
        time.sleep(0.2)
    yield shlex.join(command)
    process.terminate()
    process.wait()


def own_ipv6() -> str:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as way:
            way.connect(("2001:db8::1", 9))
            return way.getsockname()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("version", [4, 6])
def test_a_run_over_ssh_that_is_asked_to_stop(ssh, tmp_path, version):
    address = "127.0.0.1" if version == 4 else own_ipv6()
    if not address:
        pytest.skip("this machine has no IPv6 address but the loopback's, which Ray replaces by an IPv4 one")
    mark = uuid.uuid4().hex
    driver = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(130)); print('driver is up', flush=True); time.sleep(600)"
    command = [
        sys.executable,
        "-m",
        "trt_rl.cli",
        "launch",
        "ssh",
        "examples/quickstart/recipe.yaml",
        "--gpus-per-node=0",
        "--cpus-per-node=1",
    ]
    command += [f"--hosts=n1={address},n2={address}", "--object-store-memory=80000000", "--ready-timeout=300", "--ssh", ssh]
    command += [
        "--env",
        f"TRT_RL_TEST_MARK={mark}",
        "--command",
        shlex.join([sys.executable, "-c", driver]),
        f"run.folder={tmp_path}/a run",
    ]
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=file, stderr=file)
    deadline = time.monotonic() + 400
    while "driver is up" not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    shown = [p.pid for p in psutil.process_iter() if mark in " ".join(words(p))]
    assert shown == [process.pid], "a value of --env is in a command line of a host"
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 130, output.read_text()
    text = output.read_text()
    shown = f"[{address}]" if version == 6 else address
    assert f"Ray at {shown}:" in text and "2 of 2 nodes" in text
    if version == 6:
        assert f"  n2: {address}, Ray node" in text
    deadline = time.monotonic() + 60
    while left := [p for p in psutil.process_iter() if marked(p, mark)]:
        assert time.monotonic() < deadline, [p.cmdline() for p in left]
        time.sleep(0.2)


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("TRT_RL_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
