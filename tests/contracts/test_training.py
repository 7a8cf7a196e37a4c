"""The quickstart through other engines: one key of its recipe changes, and it learns."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.trtllm import environment

VLLM = ["rollout.vllm.enforce_eager=true", "rollout.vllm.block_size=32", "rollout.vllm.kv_cache_memory_bytes=268435456"]
TRAIN = [sys.executable, "-m", "trt_rl.cli", "train", "examples/quickstart/recipe.yaml", "run.tensorboard=false"]


def finished(command: list[str], folder: Path, env: dict[str, str] | None = None, mismatch: float = 0.01) -> tuple[dict, list[dict]]:
    """Run a training command to its end; its summary and the metrics of its steps."""
    done = subprocess.run(
        [*command, f"run.folder={folder}"], capture_output=True, text=True, timeout=600, check=False, env=os.environ | (env or {})
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in metrics if "loss" in m]
    assert steps[0]["ppo_kl"] == 0.0 and max(abs(m["mismatch_kl"]) for m in steps) < mismatch
    assert all(m["refit/verified_slices"] > 0 for m in steps)
    return json.loads((folder / "summary.json").read_text()), steps


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `tests/run.sh --vllm` installs a CPU build"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="options and format are those of vLLM's CPU build")
def test_the_quickstart_learns_through_vllm(tmp_path):
    summary, _ = finished([*TRAIN, "rollout.engine=vllm", "refit.format=bf16", "run.steps=6", *VLLM], tmp_path / "run")
    assert summary["heldout_accuracy_after"] > summary["heldout_accuracy_before"] + 0.1


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `tests/run.sh --vllm` installs a CPU build"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="options and format are those of vLLM's CPU build")
def test_a_run_goes_on_without_a_vllm_that_was_killed(tmp_path):
    """Its requests are asked again of the other engine, and refits go to that one only."""
    folder, steps = tmp_path / "run", 5
    options = ["rollout.engine=vllm", "rollout.replicas=2", "refit.format=bf16", f"run.steps={steps}", "data.validation=null", *VLLM]
    run = subprocess.Popen([*TRAIN, *options, f"run.folder={folder}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n")) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.05)
    cores = [p for p in psutil.Process(run.pid).children(recursive=True) if "EngineCore" in " ".join([p.name(), *p.cmdline()])]
    if cores:
        cores[0].kill()
    said, _ = run.communicate(timeout=400)
    assert run.returncode == 0 and len(cores) == 2, said[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    (lost,) = summary["engines_lost"].values()
    print(f"{summary['requests_reissued']} requests asked again; {lost}")
    assert "vLLM's engine process ended" in lost and summary["steps"] == summary["weight_version"] == steps
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["refit/engines"] == 1 and last["weight_version"] == steps


@pytest.mark.trtllm
@pytest.mark.slow  # test_recipes.py has a shorter one
def test_fp8_training_through_tensorrt_llm_across_two_nodes(tmp_path):
    """Trainer TP2 and engine TP2 span two nodes, on the same bundles: the engine sleeps while the trainer works."""
    nodes = [sys.executable, "-m", "tests.support.two_nodes", "2", "2", "--"]
    shape = ["rollout.engine=trtllm", "rollout.parallel.tp=2", "rollout.colocated=true", "refit.bf16_attention=true", "run.steps=2"]
    summary, steps = finished([*nodes, *TRAIN, *shape], tmp_path / "run", environment("1.3.0rc29"))
    assert summary["heldout_accuracy_after"] > summary["heldout_accuracy_before"]
    assert steps[0]["refit/verified_slices"] > 0 and summary["weight_version"] == 2 and not summary["engines_lost"]
