"""Refits of a loaded vLLM engine: `python benchmarks/refit/loaded_engine.py SHAPE --transport ipc|nccl --tp N --gpus 0 --json FILE`.

The trainer's ranks hold random weights of the shape's sizes. `--gpus` are vLLM's; with ipc they are the trainer's too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trt_rl.bench.vllm import VllmSetup, measure
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.precision import PrecisionPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="folder with config.json, e.g. examples/shapes/qwen3-8b")
    parser.add_argument("--transport", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--format", choices=["fp8_block", "bf16"], default="fp8_block")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    setup = VllmSetup(asked.shape, EngineLayout(asked.tp, asked.ep), PrecisionPolicy(asked.format), gpus=asked.gpus)
    result = measure(setup, Layout(), asked.transport, asked.bucket_mib << 20)
    asked.json.write_text(json.dumps(result, indent=1) + "\n")
    print({k: v for k, v in result.items() if k not in ("first", "refits")})


if __name__ == "__main__":
    main()
