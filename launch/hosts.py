"""The machines of one job: their addresses, their ports, and what is wrong with one of them. Standard library only."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from trt_rl.errors import TrtRlError

FIRST_PORT = 20000
_END = 32768  # Linux hands out ports from here on for outgoing connections; below it nothing takes ours by chance
_NAMES = ("gcs", "client", "dashboard", "node_manager", "object_manager", "agent_http", "agent_grpc", "runtime_env_agent", "metrics")
_BLOCK = 10  # ports of one node
_NEIGHBOURS = 4  # nodes of one job that may share a machine
_PROC = Path("/proc/sys/net/ipv4")


class LaunchError(TrtRlError):
    """A job cannot be started as asked; the message lists everything that was found."""

    @classmethod
    def of(cls, what: str, problems: list[str]) -> LaunchError:
        return cls(f"{what}: {len(problems)} problem(s)\n" + "\n".join(f"  - {line}" for line in problems))


@dataclass(frozen=True)
class Host:
    """A node under the name that its scheduler uses, and the address or DNS name where it is reached."""

    name: str
    address: str

    @classmethod
    def parse(cls, text: str) -> tuple[Host, ...]:
        """Of `a,b` or `a=10.0.0.1,b=fd00::2`; the first is the head.

        Raises:
            LaunchError: there is none, one has no name, or one is named twice.
        """
        hosts = tuple(cls(name, address or name) for name, _, address in (item.strip().partition("=") for item in text.split(",")))
        names = [host.name for host in hosts]
        if not all(names) or len(set(names)) < len(names):
            raise LaunchError(f"hosts = {text!r}: every host needs a name of its own; write them as a,b or a=10.0.0.1,b=10.0.0.2")
        return hosts


@dataclass(frozen=True)
class Ports:
    """What Ray listens on at one node. Workers listen on ports that the kernel gives them."""

    gcs: int
    client: int
    dashboard: int
    node_manager: int
    object_manager: int
    agent_http: int
    agent_grpc: int
    runtime_env_agent: int
    metrics: int


def slots(first: int = FIRST_PORT) -> int:
    """How many jobs can share a machine before their ports repeat."""
    return (_END - first) // (_BLOCK * _NEIGHBOURS)


def ports_of(hosts: tuple[Host, ...], me: str, job: int, first: int = FIRST_PORT) -> Ports:
    """Fixed by the job's number, so that two jobs on one machine do not meet, and by the place of `me` among the job's nodes
    on its machine (usually it is alone).

    Raises:
        LaunchError: `first` leaves no room, or more nodes share a machine than there are ports for.
    """
    if first < 1024 or slots(first) < 1:
        raise LaunchError(f"--first-port = {first}: the ports of a job lie between 1024 and {_END}; use e.g. {FIRST_PORT}")
    own = host_named(hosts, me)
    neighbours = [host.name for host in hosts if host.address == own.address]
    if (place := neighbours.index(me)) >= _NEIGHBOURS:
        raise LaunchError(f"{len(neighbours)} nodes of the job share the machine {own.address}; there are ports for {_NEIGHBOURS}")
    start = first + (job % slots(first) * _NEIGHBOURS + place) * _BLOCK
    return Ports(**{name: start + i for i, name in enumerate(_NAMES)})


def host_named(hosts: tuple[Host, ...], name: str) -> Host:
    for host in hosts:
        if host.name == name:
            return host
    raise LaunchError(f"this node calls itself {name!r}, which is none of the job's: {', '.join(h.name for h in hosts)}")


# --- addresses --------------------------------------------------------------------------------------------------


def head_address(hosts: tuple[Host, ...], version: int | None = None) -> str:
    """Where the other nodes reach the first, on which this runs: by host lookup, IPv4 before IPv6.

    Many machines call themselves 127.0.1.1 in /etc/hosts. Then the address is that of the interface from which they
    would speak to another node of the job.

    Raises:
        LaunchError: nothing but the loopback address is known and other machines take part.
    """
    head, found = hosts[0], lookup(hosts[0].address, version)
    outside = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if outside:
        return outside[0]
    others = [host for host in hosts if host.address != head.address]
    if found and not others:
        return found[0]
    for other in others:
        for address in lookup(other.address, version):
            if own := address_towards(address):
                return own
    kind = f"IPv{version} " if version else ""
    known = f"only {', '.join(found)}" if found else "nothing"
    raise LaunchError(
        f"the head {head.name} has no {kind}address that other nodes reach: looking up {head.address!r} gives {known}; "
        "give it one in DNS or /etc/hosts, or name the hosts as NAME=ADDRESS"
    )


def lookup(name: str, version: int | None = None) -> list[str]:
    """Addresses of a name, IPv4 first; without those that are valid on one link only."""
    families = {None: socket.AF_UNSPEC, 4: socket.AF_INET, 6: socket.AF_INET6}
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, families[version], socket.SOCK_STREAM)]
    except OSError:
        return []
    usable = [a for a in dict.fromkeys(found) if "%" not in a and not ipaddress.ip_address(a).is_link_local]
    return sorted(usable, key=lambda a: ipaddress.ip_address(a).version)


def address_towards(address: str) -> str:
    """This machine's address on the way to `address`; empty if there is no way. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((address, 9))
            return way.getsockname()[0]
    except OSError:
        return ""


def joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


# --- what may be wrong with a node ------------------------------------------------------------------------------


def problems_here(ports: Ports, paths: list[str], gpus: int, patience_s: float = 20.0) -> list[str]:
    """Of the machine on which this runs."""
    found = [
        f"{path} is missing; it must exist on every node (a shared folder or a copy; in a container --mount)"
        for path in paths
        if not Path(path).exists()
    ]
    if importlib.util.find_spec("ray") is None:
        found.append(f"{sys.executable} has no Ray; name the right interpreter with --python, or the image with --image")
    if gpus and (here := visible_gpus()) < gpus:
        found.append(
            f"nvidia-smi lists {here} GPUs, the job needs {gpus}; use --gpus-per-node {here}" if here else "nvidia-smi lists no GPU"
        )
    return found + ephemeral_problems(ports) + taken_ports(ports, patience_s)


def visible_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def taken_ports(ports: Ports, patience_s: float) -> list[str]:
    """A job that has just ended, or this one before it was requeued, may need some seconds to leave."""
    deadline = time.monotonic() + patience_s
    while busy := {name: port for name, port in vars(ports).items() if not _free(port)}:
        if time.monotonic() > deadline:
            listed = ", ".join(f"{port} ({name})" for name, port in busy.items())
            return [f"port in use: {listed}; stop what listens there, or choose others with --first-port"]
        time.sleep(0.5)
    return []


def _free(port: int) -> bool:
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            socket.create_server((anywhere, port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False  # any other error: this machine does not have the family
    return True


def ephemeral_problems(ports: Ports) -> list[str]:
    try:
        floor = int((_PROC / "ip_local_port_range").read_text().split()[0])
        reserved = (_PROC / "ip_local_reserved_ports").read_text().strip()
    except OSError:  # not Linux's network stack
        return []
    spans = [tuple(map(int, (part + "-" + part).split("-")[:2])) for part in reserved.split(",") if part]
    low, high = min(vars(ports).values()), max(vars(ports).values())
    if high < floor or any(start <= low and high <= end for start, end in spans):
        return []
    return [
        f"ports {low}-{high} lie where this machine takes ports for outgoing connections (from {floor} on, "
        f"net.ipv4.ip_local_port_range), so they may be gone at any time; use a lower --first-port, or reserve them in "
        "net.ipv4.ip_local_reserved_ports"
    ]


def environment_problems(pairs: tuple[str, ...]) -> list[str]:
    """Of what --env was given."""
    return [f"--env {pair!r} is not NAME=VALUE" for pair in pairs if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", pair, re.DOTALL)]


def clean_environment() -> dict[str, str]:
    """Of this process, without what Slurm, PMI and MPI left: Ray hands its environment to every worker, where TensorRT-LLM would
    choose MPI, or abort in it. Without the address and the token of another cluster, too, and without what pyxis sets in images
    of PyTorch: it describes the step, not the trainer's ranks."""
    foreign = ("PMI", "MPI", "OMPI", "SLURM", "RAY_ADDRESS", "RAY_AUTH")
    steps = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign) and name not in steps}
