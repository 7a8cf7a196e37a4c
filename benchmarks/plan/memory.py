"""The plan's memory of a trainer rank against a GPU's: `python benchmarks/plan/memory.py --json FILE`.

Each case is a process: a Megatron rank with random weights of the shape's sizes, log-probs and two updates over micro-batches that
are full. Predicted is the plan's total without refit buffers, measured is what the GPU gave all in all, CUDA context included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "qwen3-0.6b": {"shape": "qwen3-0.6b", "tokens": 16384, "megatron": {}},
    "qwen3-4b": {"shape": "qwen3-4b", "tokens": 8192, "megatron": {}},
    "qwen3-4b, full recompute": {"shape": "qwen3-4b", "tokens": 16384, "megatron": RECOMPUTE},
    "qwen3-30b-a3b, 6 of 48 layers": {"shape": "qwen3-30b-a3b", "tokens": 8192, "megatron": {}, "layers": 6},
}
LENGTH = 1024


def measure(case: dict) -> dict:
    """Runs in a process of its own, with a GPU."""
    import torch
    import torch.distributed as dist

    from benchmarks.engine.colocated import write_random_model
    from trt_rl.algo.loss import token_weights
    from trt_rl.batch import make_batch
    from trt_rl.bench.refit import hardware
    from trt_rl.config import parse_recipe
    from trt_rl.plan.memory import trainer_stages
    from trt_rl.trainer.rank import MegatronRank

    free, total = torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()  # by the context of this process, and by others
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        shape = Path(work) / "shape"
        shape.mkdir()
        config = json.loads((ROOT / "examples/shapes" / case["shape"] / "config.json").read_text())
        config["num_hidden_layers"] = case.get("layers", config["num_hidden_layers"])
        (shape / "config.json").write_text(json.dumps(config))
        write_random_model(shape, Path(work) / "model")
        recipe = parse_recipe(
            {
                "name": "memory",
                "model": {"path": f"{work}/model"},
                "data": {"train": {"source": "unused.jsonl"}, "max_prompt_tokens": 24},
                "reward": {"function": "unused:score"},
                "rollout": {"sampling": {"max_tokens": LENGTH - 24}},
                "trainer": {"microbatch_tokens": case["tokens"], "megatron": case["megatron"]},
            }
        )
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        rank = MegatronRank(recipe)
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    rows = 2 * case["tokens"] // LENGTH
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, 1000, (rows, LENGTH), generator=generator).tolist()
    batch = make_batch([t[:24] for t in tokens], [t[24:] for t in tokens], [[-1.0] * (LENGTH - 24)] * rows)
    logp = torch.zeros(rows, batch.tokens_N_S.shape[1])
    for numbers, part in rank.logprobs(batch):
        logp[numbers] = part
    advantages = torch.randn(rows, 1, generator=generator) * batch.mask_N_S
    batch = batch.with_(old_logp_N_S=logp, advantages_N_S=advantages, weights_N_S=token_weights(batch.mask_N_S, "token_mean"))
    for _ in range(2):
        rank.train(batch)
    gib = 2**30
    (predicted,) = trainer_stages(recipe, rank.arch, 0)
    measured = (torch.cuda.max_memory_reserved() + taken) / gib
    return {
        "tokens": case["tokens"],
        "megatron": case["megatron"],
        "predicted_gib": {f.name: round(getattr(predicted, f.name), 3) for f in fields(predicted)} | {"total": round(predicted.total, 2)},
        "measured_gib": {
            "total": round(measured, 2),
            "allocated_at_peak": round(torch.cuda.max_memory_allocated() / gib, 2),
            "reserved_at_peak": round(torch.cuda.max_memory_reserved() / gib, 2),
            "allocated_at_rest": round(resident / gib, 2),
            "context": round(taken / gib, 2),
        },
        "error": round(predicted.total / measured - 1, 4),
        "hardware": hardware(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help="one of them, in this process")
    asked = parser.parse_args()
    if asked.case:
        print("RESULT " + json.dumps(measure(CASES[asked.case])))
        return
    found = {}
    for name in CASES:
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run([sys.executable, __file__, "--case", name], env=env, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found[name] = json.loads(lines[-1][7:]) if lines else {"failed": done.returncode}
        print(name, json.dumps({k: v for k, v in found[name].items() if k != "hardware"}), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
