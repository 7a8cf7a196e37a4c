"""One GPU shared by Megatron (BF16) and a vLLM engine: `python benchmarks/engine/colocated.py SHAPE --format fp8_block --json FILE`.

The processes are those of a run (`rollout.colocated: true`), with random weights of the shape's sizes. Measured: refits and what
they verified, tokens/s, the gap between the engine's and the trainer's log-probs, sleep and wake, and what the pool adds to
the engine's own time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median

import torch

from trt_rl.algo.correction import mismatch_metrics
from trt_rl.arch import Arch
from trt_rl.batch import make_batch
from trt_rl.bench.refit import hardware
from trt_rl.config import parse_recipe
from trt_rl.refit.hf_files import write_folder
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.rollout.engine import Request, Sampling
from trt_rl.run import Run

ROOT = Path(__file__).parents[2]


def write_random_model(shape: Path, folder: Path) -> None:
    """A Hugging Face folder of the shape: matrices normal with deviation 0.02, norms one."""
    arch = Arch.load(shape)
    folder.mkdir(parents=True)
    shutil.copy(shape / "config.json", folder)
    generator = torch.Generator("cuda").manual_seed(0)

    def tensors():
        for name, size in PrecisionTable.build(arch, PrecisionPolicy("bf16")).shapes.items():
            if len(size) == 1:
                yield name, torch.ones(size, dtype=torch.bfloat16)
            else:
                yield name, torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=generator).cpu()

    write_folder(folder, tensors())
    torch.cuda.empty_cache()


def used_gib() -> float:
    """Of this GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 2**30, 2)


def timed(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def generate(run: Run, name: str, count: int, prompt: int, tokens: int):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    prompts = torch.randint(10, run.arch.vocab - 10, (count, prompt), generator=generator).tolist()
    requests = [Request(f"{name}-{i}", tuple(p), Sampling(max_tokens=tokens, seed=i)) for i, p in enumerate(prompts)]
    before, started = run.pool.stats()[0]["busy_s"], time.perf_counter()
    completions = run.pool.generate(requests)
    seconds, busy = time.perf_counter() - started, run.pool.stats()[0]["busy_s"] - before
    made = sum(len(c.tokens) for c in completions)
    return completions, requests, {
        "requests": count, "prompt_tokens": prompt, "new_tokens": made, "seconds": seconds, "engine_seconds": busy,
        "new_tokens_per_s": made / seconds, "pool_overhead": seconds / busy - 1,
    }  # fmt: skip


def measure(run: Run, count: int, tokens: int) -> dict:
    found: dict = {"refits": []}
    for _ in range(3):
        seconds = timed(run.refit)
        found["refits"].append({"seconds": seconds, **run.refit_metrics})
    generate(run, "warm", min(count, 64), 64, 16)
    found["generation"] = [generate(run, f"load{i}", count, 128, tokens)[2] for i in range(3)]
    completions, requests, _ = generate(run, "compare", 64, 128, 128)
    batch = make_batch([list(r.prompt) for r in requests], [c.tokens for c in completions], [c.logprobs for c in completions])
    found["mismatch"] = mismatch_metrics(run.trainer.logprobs(batch), batch.engine_logp_N_S, batch.mask_N_S)
    found["sleep"] = []
    for _ in range(2):
        record = {"awake_gib": used_gib(), "sleep_s": timed(run.rest_engines), "asleep_gib": used_gib()}
        record |= {
            "wake_and_refit_s": timed(run.refit),
            "awake_again_gib": used_gib(),
            "verified": run.refit_metrics["refit/verified_slices"],
        }
        found["sleep"].append(record)
    again = generate(run, "compare", 64, 128, 128)[0]
    found["same_tokens_after_sleep"] = sum(a.tokens == b.tokens for a, b in zip(completions, again, strict=True))
    found["tokens_per_s"] = median(g["new_tokens_per_s"] for g in found["generation"])
    found["pool_overhead"] = median(g["pool_overhead"] for g in found["generation"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=Path, help="folder with config.json, e.g. examples/shapes/qwen3-8b")
    parser.add_argument("--format", choices=["fp8_block", "bf16"], default="fp8_block")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--memory", type=float, default=0.35, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        folder = Path(work) / "model"
        write_random_model(asked.shape, folder)
        recipe = parse_recipe(
            {
                "name": "colocated",
                "model": {"path": str(folder), "tokenizer": str(ROOT / "examples/quickstart/model")},
                "data": {"train": {"source": "tests.support.tasks:sums", "args": {"size": 4, "seed": 0}}},
                "reward": {"function": "tests.support.tasks:even_length"},
                "rollout": {
                    "engine": "vllm",
                    "colocated": True,
                    "sampling": {"max_tokens": asked.tokens},
                    "vllm": {
                        "gpu_memory_utilization": asked.memory,
                        "max_model_len": 1024,
                        "max_num_seqs": 256,
                        "compilation_config": {
                            "mode": 0,
                            "cudagraph_mode": "FULL_DECODE_ONLY",
                            "cudagraph_capture_sizes": [1, 64, 128, 256],
                        },
                    },
                },
                "refit": {"format": asked.format},
                "run": {"folder": f"{work}/run", "tensorboard": False},
            }
        )
        with Run(recipe, resume=False, overwrite=True) as run:
            found = measure(run, asked.requests, asked.tokens)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    found = {"hardware": hardware() | {"driver": driver.stdout.split()[0]}, "shape": asked.shape.name, "format": asked.format} | found
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print({k: v for k, v in found.items() if k not in ("refits", "generation")})


if __name__ == "__main__":
    main()
