"""The quickstart through another engine: one key of its recipe changes, and it learns."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

OPTIONS = ["rollout.vllm.enforce_eager=true", "rollout.vllm.block_size=32", "rollout.vllm.kv_cache_memory_bytes=268435456"]


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `tests/run.sh --vllm` installs a CPU build"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="options and format are those of vLLM's CPU build")
def test_the_quickstart_learns_through_vllm(tmp_path):
    changes = ["rollout.engine=vllm", "refit.format=bf16", "run.steps=6", f"run.folder={tmp_path}/run", "run.tensorboard=false", *OPTIONS]
    command = [sys.executable, "-m", "trt_rl.cli", "train", "examples/quickstart/recipe.yaml", *changes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [m for m in metrics if "loss" in m]
    assert steps[0]["ppo_kl"] == 0.0 and max(abs(m["mismatch_kl"]) for m in steps) < 0.01
    assert all(m["refit/verified_slices"] > 0 for m in steps)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["heldout_accuracy_after"] > summary["heldout_accuracy_before"] + 0.1
