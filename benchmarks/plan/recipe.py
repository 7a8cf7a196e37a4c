"""A whole recipe on this machine's GPUs against its plan: `python benchmarks/plan/recipe.py RECIPE --shape SHAPE --steps 3 --json FILE [KEY=VALUE ...]`.

Weights are random, of the shape's sizes; the tokenizer is the quickstart's, so answers mean nothing and have full length. Measured:
the memory of the busiest GPU over the run, by all processes, and the seconds of every step; both beside what the plan says of the
recipe as it was run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks.engine.colocated import ROOT, write_random_model
from trt_rl.bench.refit import hardware
from trt_rl.config import load_recipe
from trt_rl.plan.report import make_plan


def rows(**_unused) -> list[dict]:
    """Prompts in the recipe's data's place, whatever arguments that takes."""
    return [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10, 40) for b in range(10, 40)]


def score(response: str, row: dict, **_unused) -> float:
    """Something that random text is sometimes."""
    return float(len(response) % 2 == 0)


class MemoryWatch:
    """The most GiB in use on any GPU, asked of the driver five times a second."""

    def __enter__(self) -> MemoryWatch:
        self.most = 0.0
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        for line in self.process.stdout:
            self.most = max(self.most, int(line) / 1024)

    def __exit__(self, *error) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--shape", required=True, help="a folder of examples/shapes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        model, run = Path(work) / "model", Path(work) / "run"
        write_random_model(ROOT / "examples/shapes" / asked.shape, model)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "examples/quickstart/model" / file, model)
        overrides = [
            f"model.path={model}",
            "data.train.source=benchmarks.plan.recipe:rows",
            "data.validation=null",
            "reward.function=benchmarks.plan.recipe:score",
            f"run={{steps: {asked.steps}, folder: {run}, save_every: 0, save_hf: false, tensorboard: false}}",
            *asked.overrides,
        ]
        plan = make_plan(load_recipe(asked.recipe, overrides))
        command = [sys.executable, "-m", "trt_rl.cli", "train", str(asked.recipe), *overrides]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        with MemoryWatch() as memory:
            subprocess.run(command, cwd=ROOT, env=env, check=True)
        steps = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    parts = plan.memory_gib
    together = parts.get("colocated", {}).get("generating", 0.0)
    found = {
        "recipe": str(asked.recipe),
        "overrides": overrides,
        "violations": plan.violations,
        "predicted": {"memory_gib": parts, "projection": plan.projection},
        "measured": {
            "most_gib": round(memory.most, 2),
            "steps": [{k: round(v, 4) for k, v in row.items() if k.startswith("seconds/") or "tokens" in k} for row in steps],
        },
        "hardware": hardware(),
    }
    if together:
        found["error"] = round(max(together, parts["trainer"]["total"]) / memory.most - 1, 4)
    print(json.dumps(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
