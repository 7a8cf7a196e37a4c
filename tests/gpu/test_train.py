"""A whole run on two GPUs: Megatron with Transformer Engine on one, the embedded FP8 engine on the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.timeout(400),
]


def test_the_quickstart_learns_on_gpus(tmp_path):
    recipe = yaml.safe_load((ROOT / "examples/quickstart/recipe.yaml").read_text())
    for name, size in (("train", 4000), ("validation", 200)):  # reasoning-gym is not everywhere
        recipe["data"][name] = {"source": "tests.support.tasks:sums", "args": {"size": size, "seed": size}}
    recipe["reward"]["function"] = "tests.support.tasks:exact"
    recipe["trainer"]["parallel"] = {"tp": 1}
    recipe["run"] |= {"steps": 30, "folder": str(tmp_path / "run"), "tensorboard": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "trt_rl.cli", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    print(done.stdout[-6000:], done.stderr[-3000:])
    assert done.returncode == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [m for m in metrics if "loss" in m]
    assert trained[0]["ppo_kl"] == 0.0
    assert summary["heldout_accuracy_after"] > summary["heldout_accuracy_before"] + 0.2
