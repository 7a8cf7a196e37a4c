"""The real sbatch script in a real Slurm of two nodes on this machine, with a real Ray on both.

All jobs are submitted at once and wait for each other as little as Slurm lets them; each test looks at its own.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from launch.hosts import Host, ports_of, taken_ports
from tests.slurm.cluster import NODES, SlurmCluster

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/quickstart/recipe.yaml"
HOSTILE = """it's $(touch pwned) "q" `touch pwned` #1 \\x %j; touch pwned"""
LEFT_BY_LAUNCHERS = {"PMI_RANK": "5", "PMIX_RANK": "5", "MPI_LOCALRANKID": "5", "OMPI_COMM_WORLD_RANK": "5", "SLURM_MPI_TYPE": "none"}
TRAINING = [
    "trainer.parallel={tp: 1, dp: 3}",  # three ranks and an engine on nodes of two CPUs: the ranks cannot share a node
    "data.train.args.size=64",
    "data.validation.args.size=8",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "algo.dynamic_sampling.max_rounds=50",
    "trainer.optimizer={lr: 1.0e-7, min_lr: 0}",  # it stays as good as it is, however many steps a slow machine lets it take
    "run.tensorboard=false",
    "run.validate_every=0",
    "refit.bucket_mib=1",
    "run.steps=1000",
]

pytestmark = pytest.mark.timeout(900)


@dataclass
class Job:
    slurm: SlurmCluster
    number: str
    folder: Path
    mark: str

    @property
    def launch(self) -> Path:
        return self.folder / "launch"

    def text(self) -> str:
        output = self.launch / f"slurm-{self.number}.out"
        return output.read_text() if output.exists() else ""

    def wait(self) -> dict[str, str]:
        return self.slurm.wait(self.number, 600)

    def until(self, holds, what: str) -> None:
        def look() -> bool:
            assert self.slurm.state(self.number) in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), self.text()
            return holds()

        self.slurm.until(look, what, 600)

    def left_behind(self) -> list[str]:
        """Processes of this job, and listeners on its ports (Ray's agents hide their environment), once they have had time to end."""
        deadline = time.monotonic() + 60
        for node in NODES:
            if taken := taken_ports(ports_of(Host.parse("n1=127.0.0.1,n2=127.0.0.1"), node, int(self.number)), 60):
                return taken
        while found := [p for p in psutil.process_iter() if self._ours(p)]:
            if time.monotonic() > deadline:
                return [" ".join(p.cmdline())[:100] for p in found]
            time.sleep(0.3)
        return []

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TRT_RL_TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def submit(slurm: SlurmCluster, folder: Path, *arguments: str, driver: list[str] | None = None, python: str = sys.executable) -> Job:
    """Through the command line, as a user does, in an environment as an MPI launcher leaves it."""
    mark = uuid.uuid4().hex
    environment = slurm.environment | LEFT_BY_LAUNCHERS | {"TRT_RL_TEST_MARK": mark, "PYTHONPATH": str(ROOT), "NCCL_DEBUG": "WARN"}
    command = [sys.executable, "-m", "trt_rl.cli", "launch", "slurm", str(RECIPE), "--nodes=2", "--gpus-per-node=0", "--cpus-per-node=2"]
    command += ["--object-store-memory=80000000", "--ready-timeout=400", "--submit", *arguments]
    command.append(f"run.folder={json.dumps(str(folder))}")  # overrides are YAML: quoted, because # may begin a comment
    if driver:
        command += ["--command", shlex.join([python, str(ROOT / "tests/slurm/drivers.py"), *driver])]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Job(slurm, re.match(r"job (\d+);", done.stdout)[1], folder, mark)


@pytest.fixture(scope="module")
def jobs(slurm, tmp_path_factory) -> dict[str, Job]:
    root = tmp_path_factory.mktemp("jobs")
    awkward = root / "it's a $HOME, 100% of #1"
    awkward.mkdir(parents=True)
    found = {"training": submit(slurm, root / "training", *TRAINING)}
    one, two = ["one", "two", "0", "a b", "$(touch pwned)", "'", '"'], ["two", "one", "7"]
    found["one"] = submit(slurm, awkward / "run", "--job-name", HOSTILE, driver=["report", str(root), *one])
    found["two"] = submit(slurm, root / "two", "--no-requeue", driver=["report", str(root), *two])
    # Signals are off in this job: the time limit itself is looked at.
    found["limit"] = submit(slurm, root / "limit", "--time=1", "--sbatch=--signal=B:CONT@1", driver=["stubborn", str(root)])
    found["memory"] = submit(slurm, root / "memory", "--sbatch=--mem=3000", driver=["grow", str(root)])
    late = 'if [ "$SLURMD_NODENAME" = n2 ] && [[ "$*" = *cluster\\ worker* ]]; then sleep 3600; fi'
    found["absent"] = submit(slurm, root / "absent", f"--setup={late}", "--ready-timeout=60", driver=["sleep", str(root / "absent")])
    found["cancelled"] = submit(slurm, root / "cancelled", driver=["sleep", str(root / "cancelled")])
    return found


def test_what_a_node_lacks_is_found_before_ray_starts(slurm, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/quickstart/model", model)
    job = submit(slurm, tmp_path / "run", "--sbatch=--hold", f"model.path={model}", "trainer.parallel={tp: 1, dp: 3}")
    shutil.rmtree(model)  # between submission and start
    ports = ports_of(Host.parse("n1=127.0.0.1,n2=127.0.0.1"), "n2", int(job.number))
    with socket.create_server(("127.0.0.1", ports.node_manager)):
        subprocess.run(["scontrol", "release", job.number], env=slurm.environment, check=True)
        assert job.wait()["ExitCode"] == "2:0"
    text = job.text()
    for node in ("n1", "n2"):
        assert f"{node}: {model}/config.json is missing" in text
    assert f"n2: port in use: {ports.node_manager} (node_manager)" in text and "n1: port in use" not in text
    assert "nothing was started" in text and not list(job.launch.glob("*/*.log"))


def one_more_step(job: Job, saved: int) -> None:
    """Change what the job reads when it starts again: one step after the checkpoint, then it is done."""
    (recipe,) = job.launch.glob("recipe-*.yaml")
    tree = yaml.safe_load(recipe.read_text())
    tree["run"]["steps"] = saved + 1
    recipe.write_text(yaml.safe_dump(tree))


def last_saved(job: Job) -> int:
    return max((int(p.parent.name.removeprefix("step_")) for p in job.folder.glob("checkpoints/step_??????/state.json")), default=0)


def test_training_on_both_nodes_interrupted_requeued_resumed(slurm, jobs):
    job = jobs["training"]
    metrics = job.folder / "metrics.jsonl"
    job.until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), "the first step")
    slurm.cancel(job.number, "--batch", "--signal=USR1")
    job.until(lambda: last_saved(job), "a checkpoint")
    saved = last_saved(job)
    one_more_step(job, saved)
    shown, text = job.wait(), job.text()
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert "interrupted: back into the queue" in text and f"step {saved}, weight version" in text.partition("attempt 2")[2]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, saved + 2))
    for attempt in text.split("attempt ")[1:]:
        node_of = dict(re.findall(r"^  (n[12]): .*Ray node (\w{12})", attempt, re.MULTILINE))
        ranks = dict(re.findall(r"^node (\w+): trainer ranks ([\d, ]+)", attempt, re.MULTILINE))
        assert set(ranks) == set(node_of.values()) and len(ranks) == 2, attempt
        assert sorted(rank for listed in ranks.values() for rank in listed.split(", ")) == ["0", "1", "2"]
    assert not job.left_behind()


def test_two_jobs_share_the_machines(slurm, jobs):
    one, two, root = jobs["one"], jobs["two"], jobs["two"].folder.parent
    for job, name in ((one, "one"), (two, "two")):
        job.until((root / f"{name}.json").exists, f"the report of job {name}")
    attach = next(one.launch.glob("*/attach.sh"))
    program = "import ray; ray.init(log_to_driver=False); print('nodes:', len(ray.nodes()))"
    environment = slurm.environment | {"PYTHONPATH": str(ROOT)}
    inside = subprocess.run(
        ["bash", str(attach), "n2", sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert "nodes: 2" in inside.stdout, inside.stdout + inside.stderr
    (root / "go").touch()
    assert one.wait()["JobState"] == "COMPLETED" and one.wait()["ExitCode"] == "0:0", one.text()
    assert two.wait()["JobState"] == "FAILED" and two.wait()["ExitCode"] == "7:0", two.text()
    reports = [json.loads((root / f"{name}.json").read_text()) for name in ("one", "two")]
    assert reports[0]["driver"]["RAY_ADDRESS"] != reports[1]["driver"]["RAY_ADDRESS"]
    assert not reports[0]["workers"].keys() & reports[1]["workers"].keys()
    for report in reports:
        assert len(report["workers"]) == 2
        for environment in (report["driver"], *report["workers"].values()):
            left = [name for name in environment if re.match("PMI|PMIX|MPI|OMPI|SLURM", name)]
            assert not left and environment["NCCL_DEBUG"] == "WARN"
    assert reports[0]["arguments"] == ["a b", "$(touch pwned)", "'", '"'] and reports[0]["cwd"] == str(ROOT)
    assert HOSTILE in subprocess.run(["scontrol", "show", "job", one.number], env=slurm.environment, capture_output=True, text=True).stdout
    assert not [path for folder in (ROOT, Path.home(), root, one.folder, one.launch) for path in folder.glob("pwned*")]
    logs = next(path for path in one.launch.iterdir() if path.is_dir())
    assert {"n1.log", "n2.log", "n1.ray", "n2.ray"} <= {path.name for path in logs.iterdir()}
    assert not one.left_behind() and not two.left_behind()


@pytest.mark.slow  # Slurm counts time limits in minutes
def test_before_the_time_limit_slurm_has_it_saved_and_requeued(slurm, tmp_path):
    job = submit(slurm, tmp_path / "run", "--time=5", "--grace=60", *TRAINING)
    job.until(lambda: last_saved(job), "a checkpoint that Slurm's own signal asked for")
    one_more_step(job, last_saved(job))
    shown, text = job.wait(), job.text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0") and int(shown["Restarts"]) >= 1, text
    assert "interrupted: back into the queue" in text and "resumed from" in text and "TIME LIMIT" not in text
    assert not job.left_behind()


@pytest.mark.slow
def test_an_array_of_replicas(slurm, tmp_path):
    whole = submit(slurm, tmp_path / "run", "--replicas=2", *TRAINING, "run.steps=2")
    for i in range(2):
        task = Job(slurm, f"{whole.number}_{i}", whole.folder, whole.mark)
        shown = task.wait()
        assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), task.text()
        assert json.loads((task.folder / f"replica_{i}/summary.json").read_text())["steps"] == 2
        assert yaml.safe_load((task.folder / f"replica_{i}/recipe.yaml").read_text())["seed"] == 1 + i
    assert not (whole.folder / "summary.json").exists()


def test_a_job_over_its_memory_is_killed(jobs):
    job = jobs["memory"]
    shown = job.wait()
    assert shown["JobState"] in ("OUT_OF_MEMORY", "CANCELLED", "FAILED") and shown["ExitCode"] != "0:0", shown
    assert "memory limit" in job.text()
    assert not job.left_behind()


def test_a_node_that_never_joins_is_named_at_the_deadline(jobs):
    job = jobs["absent"]
    assert job.wait()["ExitCode"] == "2:0"
    assert "error: the Ray cluster was not complete after 60 s" in job.text()
    assert "- n2 (127.0.0.1) did not join; it passed the checks, then nothing was heard of it" in job.text()
    assert not (job.folder / "started").exists() and not job.left_behind()


def test_a_cancelled_job_ends_and_stays_away(slurm, jobs):
    job = jobs["cancelled"]
    job.until((job.folder / "started").exists, "its driver")
    slurm.cancel(job.number)
    shown = job.wait()
    assert shown["JobState"] == "CANCELLED" and shown["Restarts"] == "0"
    assert not job.left_behind()
    assert slurm.state(job.number) == "CANCELLED"


def test_the_time_limit_ends_a_driver_that_does_not_listen(jobs):
    job = jobs["limit"]
    assert job.wait()["JobState"] == "TIMEOUT", job.text()
    assert not job.left_behind()
