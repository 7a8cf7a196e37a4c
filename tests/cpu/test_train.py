"""Whole runs through the command line: real Ray, real Megatron, a real engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/quickstart/recipe.yaml"
SMALL = [
    "data.train.args.size=64",
    "data.validation.args.size=16",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "algo.dynamic_sampling.max_rounds=3",
    "run.tensorboard=false",
    "run.validate_every=0",
    "refit.bucket_mib=1",
]


class Cli:
    """`trt-rl train` in a session of its own; every process it leaves behind can be found by an environment mark."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark, self.folder = uuid.uuid4().hex, folder
        environment = os.environ | {"TRT_RL_TEST_MARK": self.mark, "TRT_RL_TEST_DIR": str(folder.parent), "PYTHONPATH": str(ROOT)}
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", "trt_rl.cli", "train", str(RECIPE), *SMALL, f"run.folder={folder}", *arguments]
        self.log = folder.parent / f"{folder.name}.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)

    def finish(self, code: int = 0, timeout: float = 600) -> str:
        assert self.process.wait(timeout) == code, self.text()
        return self.text()

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, timeout: float = 400) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.text():
            assert self.process.poll() is None, f"ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"{text!r} did not appear:\n{self.text()}"
            time.sleep(0.05)

    def left_behind(self, patience: float = 30) -> list[str]:
        deadline = time.monotonic() + patience
        while found := [p for p in psutil.process_iter() if self._ours(p)]:
            if time.monotonic() > deadline:
                return [" ".join(p.cmdline())[:80] for p in found]
            time.sleep(0.2)
        return []

    def members(self, title: str) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._ours(p) and p.cmdline() and title in p.cmdline()[0]]

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TRT_RL_TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def metrics(self) -> dict[int, dict]:
        """Training metrics by step, without timings."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {
            m["step"]: {k: v for k, v in m.items() if not k.startswith("seconds/") and not k.endswith("_s")} for m in lines if "loss" in m
        }

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model with the quickstart's tokenizer."""
    from tests.support.models import write_model

    root, tokenizer = tmp_path_factory.mktemp("tiny"), ROOT / "examples/quickstart/model"

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            write_model(folder, kind, vocab_size=312)
            for file in tokenizer.glob("tokenizer*.json"):
                shutil.copy(file, folder)
        return folder

    return make


def check_outputs(cli: Cli, steps: int) -> dict:
    summary, metrics = cli.summary(), cli.metrics()
    assert summary["steps"] == steps == len(metrics) and summary["weight_version"] == steps
    assert {"heldout_accuracy_before", "heldout_accuracy_after", "seconds", "seconds_by_phase", "refit_bytes"} <= summary.keys()
    assert (cli.folder / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert Path(summary["checkpoint"]).joinpath("state.json").is_file()
    for step in range(1, steps + 1):
        rows = [json.loads(line) for line in (cli.folder / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]
        assert len(rows) % 4 == 0 and len(rows) >= 16
        for row in rows:
            assert len(row["tokens"]) == len(row["logprobs"]) == len(row["weight_versions"])
            assert set(row["weight_versions"]) == {step - 1} and all(p <= 0 for p in row["logprobs"])
    assert metrics[1]["ppo_kl"] == 0.0 and metrics[1]["clip_fraction"] == 0.0
    assert load_exported(cli) and not cli.left_behind()
    return metrics


def load_exported(cli: Cli) -> bool:
    """The trained model is a Hugging Face folder that differs from the one the run began with."""
    import torch
    import transformers
    import yaml

    start = yaml.safe_load((cli.folder / "recipe.yaml").read_text())["model"]["path"]
    before = transformers.AutoModelForCausalLM.from_pretrained(ROOT / start, dtype=torch.float32)
    after = transformers.AutoModelForCausalLM.from_pretrained(cli.folder / "model", dtype=torch.float32)
    transformers.AutoTokenizer.from_pretrained(cli.folder / "model")
    changes = [(a - b).abs().max().item() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    return 0 < max(changes) < 0.1


def test_moe_with_expert_parallelism_and_a_reward_that_fails(tiny, tmp_path):
    cli = Cli(
        tmp_path / "moe",
        f"model.path={tiny('moe')}",
        "trainer.parallel={tp: 1, ep: 2, dp: 2}",
        "reward.function=tests.support.tasks:sometimes_fails",
        "reward.timeout_s=2",
        "run.steps=2",
        "run.tensorboard=true",
    )
    text = cli.finish()
    metrics = check_outputs(cli, 2)
    assert metrics[1]["reward_failures"] > 0 and cli.summary()["reward_failures"] == sum(m["reward_failures"] for m in metrics.values())
    assert "verifier broke" in text or "returned nan" in text or "took longer" in text
    assert (tmp_path / "hung").exists(), "the hanging branch was never taken"
    assert "tis_mean" in metrics[1], "importance correction is on by default with FP8 weights"
    assert list((cli.folder / "tensorboard").iterdir())


def test_dense_with_pipeline_parallelism_and_two_engines(tiny, tmp_path):
    cli = Cli(
        tmp_path / "pp",
        f"model.path={tiny('dense')}",
        "trainer.parallel={tp: 1, pp: 2}",
        "reward.function=tests.support.tasks:even_length",
        "rollout.replicas=2",
        "trainer.mini_batches=2",
        "algo.dynamic_sampling.on_shortfall=stop",
        "algo.dynamic_sampling.max_rounds=8",
        "run.steps=2",
    )
    cli.finish()
    metrics = check_outputs_without_kl(cli, 2)
    assert all(m["groups_trained"] == 4 for m in metrics.values()), "exact refill"


def check_outputs_without_kl(cli: Cli, steps: int) -> dict:
    """With several updates a step, later mini-batches are off policy: `ppo_kl` need not be 0."""
    assert cli.summary()["steps"] == steps and not cli.left_behind()
    return cli.metrics()


def test_bf16_engine_and_trainer_agree(tmp_path):
    cli = Cli(tmp_path / "bf16", "refit.format=bf16", "run.steps=1", "rollout.prompts_per_step=16")
    cli.finish()
    metrics = check_outputs(cli, 1)
    assert metrics[1]["mismatch_abs_logp"] <= 0.01 and metrics[1]["mismatch_kl"] < 0.002
    assert "tis_mean" not in metrics[1]


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    settings = ["run.steps=4", "run.save_every=1", "rollout.prompts_per_step=8", "trainer.optimizer.decay_steps=10"]
    straight = Cli(tmp_path / "straight", *settings)
    straight.finish()
    expected = check_metrics(straight, 4)

    killed = Cli(tmp_path / "killed", *settings, "run.steps=40")
    killed.wait_for("step 3/40")
    killed.process.kill()
    killed.process.wait()
    assert not killed.left_behind(), "a killed driver must take its processes along"
    done = max(int(p.name.removeprefix("step_")) for p in (killed.folder / "checkpoints").glob("step_??????"))
    shutil.rmtree(killed.folder / f"checkpoints/step_{done:06d}")  # so that steps to repeat remain, whatever the timing
    resumed = Cli(killed.folder, *settings, "--resume")
    assert f"step {done - 1}," in resumed.finish()
    assert {step: m for step, m in resumed.metrics().items()} == expected
    assert resumed.summary()["heldout_accuracy_after"] == straight.summary()["heldout_accuracy_after"]
    assert resumed.summary()["heldout_accuracy_before"] == straight.summary()["heldout_accuracy_before"]


def check_metrics(cli: Cli, steps: int) -> dict:
    metrics = cli.metrics()
    assert list(metrics) == list(range(1, steps + 1))
    return metrics


def test_ctrl_c_saves_and_leaves_nothing_behind(tiny, tmp_path):
    cli = Cli(tmp_path / "stopped", "run.steps=500")
    cli.wait_for("step 1/500")
    os.killpg(cli.process.pid, signal.SIGINT)  # what a terminal does: every process of the group gets it
    text = cli.finish(code=130)
    assert "finishing this step" in text and "Traceback" not in text and not cli.left_behind()
    summary = cli.summary()
    assert summary["interrupted"] and summary["steps"] >= 1
    steps = summary["steps"] + 1
    again = Cli(cli.folder, f"run.steps={steps}", "--resume")
    again.finish()
    assert again.summary()["steps"] == steps and not again.summary()["interrupted"]

    refused = Cli(cli.folder, "run.steps=1")
    assert "already holds a run" in refused.finish(code=2)
    other = Cli(cli.folder, f"model.path={tiny('dense')}", "--resume")
    assert "is of another model than model.path" in other.finish(code=2)
    layout = Cli(cli.folder, "trainer.parallel.tp=1", "--resume")
    assert "tp: 2 then, 1 now" in layout.finish(code=2)


def test_sigterm_saves_and_a_job_put_back_into_the_queue_continues(tmp_path):
    folder = tmp_path / "queued"
    (folder / "checkpoints/step_000001.partial").mkdir(parents=True)  # an attempt that ended before its first checkpoint
    (folder / "metrics.jsonl").write_text("{}\n")
    first = Cli(folder, "run.steps=500", "--resume-or-start")
    first.wait_for("step 1/500")
    assert (folder / "unfinished_1/metrics.jsonl").read_text() == "{}\n", "nothing of the first attempt is lost"
    second = Cli(folder, "run.steps=500", "--resume-or-start")
    assert second.process.wait(300) == 2 and f"is in use by process {first.process.pid}" in second.text()
    first.process.terminate()
    text = first.finish(code=130)
    assert "finishing this step" in text and "resumed from" not in text and "Traceback" not in text and not first.left_behind()
    steps = first.summary()["steps"] + 1
    again = Cli(folder, f"run.steps={steps}", "--resume-or-start")
    assert f"step {steps - 1}, weight version" in again.finish()
    assert again.summary()["steps"] == steps and list(again.metrics()) == list(range(1, steps + 1))
    shutil.rmtree(folder / "checkpoints")
    refused = Cli(folder, "--resume-or-start")
    assert "already holds a run (metrics.jsonl, summary.json)" in refused.finish(code=2), "a finished run is never replaced"


def test_a_dead_trainer_rank_is_named_and_the_run_ends(tmp_path):
    cli = Cli(tmp_path / "dead", "run.steps=500")
    cli.wait_for("step 1/500")
    cli.members("ray::MegatronActor")[0].kill()
    text = cli.finish(code=2, timeout=300)
    assert "WorkerDied" in text and "trainer rank" in text and "Traceback" not in text
    assert not cli.left_behind()


def test_a_mistake_found_at_the_start_costs_nothing_that_was_there(tmp_path):
    kept = tmp_path / "run/checkpoints/step_000001/state.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    for mistake, message in (
        ("data.train.args.task=chain_sums", "data.train.source: trt_rl.data.reasoning:rows raised"),
        ("reward.args={wrong: 1}", "reward.args do not fit"),
        ("reward.function=tests.support.tasks:nothing", "reward.function = 'tests.support.tasks:nothing' cannot be loaded"),
    ):
        text = Cli(tmp_path / "run", "--overwrite", mistake).finish(code=2)
        assert message in text and "Traceback" not in text
    assert kept.exists()


def test_a_reward_that_always_fails_ends_the_run(tmp_path):
    cli = Cli(tmp_path / "hopeless", "reward.function=tests.support.tasks:brackets", "run.steps=2")
    text = cli.finish(code=2)
    assert "step 1: reward.function failed on every sample" in text and "[/INST]" in text and "Traceback" not in text
    assert not cli.left_behind()


def test_folders_and_checkpoints_that_cannot_be_used(tmp_path):
    assert "cannot be written" in Cli(tmp_path / "proc", "run.folder=/proc/nowhere/run").finish(code=2)
    assert "holds no complete checkpoint" in Cli(tmp_path / "empty", "--resume").finish(code=2)
    damaged = tmp_path / "damaged"
    shutil.copytree(ROOT / "examples/quickstart/model", damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is truncated" in Cli(tmp_path / "cut", f"model.path={damaged}").finish(code=2)
    weights.unlink()
    assert "holds neither model.safetensors nor" in Cli(tmp_path / "gone", f"model.path={damaged}").finish(code=2)
    missing = Cli(tmp_path / "missing", "model.path=/nowhere")
    assert "config.json does not exist" in missing.finish(code=2)
