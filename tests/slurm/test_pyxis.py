"""The real sbatch script with `--container pyxis`: NVIDIA's pyxis and enroot start the image of docker/Dockerfile on both nodes.

TRT_RL_IMAGE names the image as a squashfs file (`enroot import`), TRT_RL_PYXIS the plugin where it lies in none of Slurm's folders;
`enroot` must be on PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, SlurmCluster
from tests.slurm.test_slurm import LEFT_BY_LAUNCHERS, ROOT, Job, submit

PLUGIN = "spank_pyxis.so"
FOLDERS = (
    "/usr/local/lib/slurm",
    "/usr/lib/slurm",
    "/usr/lib64/slurm",
    "/usr/lib/x86_64-linux-gnu/slurm",
    "/usr/lib/aarch64-linux-gnu/slurm",
)
AWKWARD = "it's a run; 100% of #1"

pytestmark = pytest.mark.timeout(1800)


def plugin() -> Path | None:
    named = os.environ.get("TRT_RL_PYXIS")
    places = [Path(named)] if named else [Path(folder, PLUGIN) for folder in FOLDERS]
    return next((place for place in places if place.is_file()), None)


def image() -> Path | None:
    named = os.environ.get("TRT_RL_IMAGE")
    return Path(named) if named and Path(named).is_file() else None


@pytest.fixture(scope="module")
def pyxis():
    if (why := SlurmCluster.cannot_start()) is not None:
        pytest.skip(f"no Slurm here: {why}")
    if shutil.which("enroot") is None:
        pytest.skip("enroot is not installed (https://github.com/NVIDIA/enroot)")
    if plugin() is None:
        pytest.skip(f"no {PLUGIN}: build pyxis (https://github.com/NVIDIA/pyxis) and name the file in TRT_RL_PYXIS")
    if image() is None:
        pytest.skip("no image: build docker/Dockerfile, `enroot import` it, and name the squashfs file in TRT_RL_IMAGE")
    cluster = SlurmCluster(plugin())
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def outside() -> Iterator[Path]:
    """Not in /tmp, which containers share with the host."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="trt_rl_") as folder:
        yield Path(folder)


def contained(pyxis: SlurmCluster, folder: Path, *arguments: str, driver: list[str] | None = None) -> Job:
    return submit(pyxis, folder, "--container=pyxis", f"--image={image()}", *arguments, driver=driver, python="python")


def unpacked(pyxis: SlurmCluster, seconds: float = 60) -> list[str]:
    """Containers that are on the nodes' disks, once pyxis has had time to remove them."""
    deadline = time.monotonic() + seconds
    while found := [str(one) for node in NODES for one in pyxis.root_filesystems(node).glob("*")]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return found


def test_training_in_containers_on_both_nodes(pyxis, outside):
    """The model lies outside of the working folder, as Hugging Face's cache has it: links to another folder."""
    run, blobs, model = outside / AWKWARD, outside / "a cache/blobs", outside / "a cache/snapshots/rev"
    shutil.copytree(ROOT / "examples/quickstart/model", blobs)
    model.mkdir(parents=True)
    for file in blobs.iterdir():
        (model / file.name).symlink_to(f"../../blobs/{file.name}")
    job = contained(pyxis, run, f"model.path={model}", "run.steps=2")
    shown = job.wait()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), job.text()
    steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2] and steps[1]["weight_version"] == 2
    assert len(set(re.findall(r"^  n[12]: .*Ray node (\w{12})", job.text(), re.MULTILINE))) == 2, job.text()
    assert not job.left_behind() and not unpacked(pyxis)


def test_a_driver_sees_the_launchs_variables_and_its_exit_code_is_the_jobs(pyxis, outside):
    # The image sets LOGNAME itself; PYTORCH_VERSION, as NVIDIA's images have it, makes pyxis set RANK and LOCAL_RANK.
    given = ["--env=LOGNAME=of the launch's", "--env=PYTORCH_VERSION=1", "--env=MPLCONFIGDIR=/tmp"]
    job = contained(pyxis, outside / "a run", *given, driver=["report", str(outside / "a run"), "one", "one", "7", "a b", "$(touch pwned)"])
    report = outside / "a run/one.json"
    job.until(report.exists, "the driver's report")
    attach = next(job.launch.glob("*/attach.sh"))
    program = "import ray; ray.init(log_to_driver=False); print('nodes:', len(ray.nodes()))"
    inside = subprocess.run(["bash", str(attach), "n2", "python", "-c", program], env=pyxis.environment, capture_output=True, text=True)
    (outside / "a run/go").touch()
    shown = job.wait()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "7:0"), job.text()
    assert "nodes: 2" in inside.stdout, inside.stdout + inside.stderr
    found = json.loads(report.read_text())
    assert found["arguments"] == ["a b", "$(touch pwned)"] and found["cwd"] == str(ROOT) and len(found["workers"]) == 2
    foreign = (*LEFT_BY_LAUNCHERS, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    for environment in (found["driver"], *found["workers"].values()):
        left = [name for name in environment if re.match("PMI|PMIX|MPI|OMPI|SLURM", name) or name in foreign]
        assert not left and environment["NCCL_DEBUG"] == "WARN" and environment["LOGNAME"] == "of the launch's"
        assert environment["HOME"] != os.environ.get("HOME") and environment["PATH"].startswith("/opt/trt_rl/bin:"), "the image's"
    assert not job.left_behind() and not unpacked(pyxis)


def test_a_cancelled_job_leaves_no_process(pyxis, outside):
    """It may leave a container on a node's disk, because Slurm kills `enroot remove` as well: see docker/README.md."""
    run = outside / "run"
    job = contained(pyxis, run, driver=["sleep", str(run)])
    job.until((run / "started").exists, "its driver")
    pyxis.cancel(job.number)
    assert job.wait()["JobState"] == "CANCELLED"
    assert not job.left_behind()
