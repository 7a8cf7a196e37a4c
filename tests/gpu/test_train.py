"""Whole runs on GPUs: Megatron with Transformer Engine, and an FP8 engine beside it or on the same GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
VLLM = {
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.2,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 64, 256]},
}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


def run(tmp_path, rollout: dict, refit: dict, steps: int, gpus: int, trainer: dict | None = None) -> tuple[dict, list[dict]]:
    """Train the quickstart's model; its summary and the metrics of its steps."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA GPU(s)")
    if rollout["engine"] != "hf" and importlib.util.find_spec(rollout["engine"]) is None:
        pytest.skip(f"{rollout['engine']} is not installed")
    recipe = yaml.safe_load((ROOT / "examples/quickstart/recipe.yaml").read_text())
    for name, size in (("train", 4000), ("validation", 200)):  # reasoning-gym is not everywhere
        recipe["data"][name] = {"source": "tests.support.tasks:sums", "args": {"size": size, "seed": size}}
    recipe["reward"]["function"] = "tests.support.tasks:exact"
    recipe["trainer"] |= {"parallel": {"tp": 1}} | (trainer or {})
    recipe["rollout"] |= rollout
    recipe["refit"] |= refit
    recipe["run"] |= {"steps": steps, "folder": str(tmp_path / "run"), "tensorboard": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "trt_rl.cli", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False, env=os.environ | ENVIRONMENT)
    print(done.stdout[-6000:], done.stderr[-6000:])
    assert done.returncode == 0
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    steps = [m for m in metrics if "loss" in m]
    assert steps[0]["ppo_kl"] == 0.0 and all(m["refit/verified_slices"] > 0 for m in steps)
    assert summary["heldout_accuracy_after"] > summary["heldout_accuracy_before"] + 0.2
    return summary, steps


def test_the_embedded_engine_on_a_gpu_of_its_own(tmp_path):
    run(tmp_path, {"engine": "hf"}, {}, steps=30, gpus=2)


def test_vllm_fp8_on_the_trainers_gpu(tmp_path):
    """It sleeps while the trainer works, whose gradients and optimizer are away while it generates; buckets come through CUDA IPC."""
    rollout = {"engine": "vllm", "colocated": True, "vllm": VLLM}
    run(tmp_path, rollout, {"format": "fp8_block"}, steps=25, gpus=1, trainer={"offload": ["gradients", "optimizer"]})


def test_sglang_fp8_on_the_trainers_gpu(tmp_path):
    options = {"attention_backend": "triton", "disable_cuda_graph": True, "mem_fraction_static": 0.2, "max_running_requests": 256}
    run(tmp_path, {"engine": "sglang", "colocated": True, "sglang": options}, {"format": "fp8_block"}, steps=20, gpus=1)


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_vllm_tp2_on_gpus_of_its_own(tmp_path, executor):
    """`ray`: vLLM's workers are Ray actors in bundles that the run reserves, as across nodes."""
    options = VLLM | {"disable_custom_all_reduce": True, "distributed_executor_backend": executor}
    rollout = {"engine": "vllm", "parallel": {"tp": 2}, "vllm": options}
    run(tmp_path, rollout, {"format": "fp8_block", "bf16_attention": True}, steps=20, gpus=3)
