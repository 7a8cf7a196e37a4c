"""Reward functions that end-to-end tests name in their recipes."""

from __future__ import annotations

import os
import time


def even_length(response: str, row: dict, answer_key: str = "") -> float:
    """Something a random model sometimes gets right, whatever the answer."""
    return float(len(response) % 2 == 0)


def sometimes_fails(response: str, row: dict) -> float:
    """Raises, hangs or returns NaN on some samples; right and wrong answers otherwise."""
    kind = sum(map(ord, response)) % 5
    if kind == 0:
        raise RuntimeError("verifier broke")
    if kind == 1:
        return float("nan")
    if kind == 2 and not os.path.exists(f"{os.environ['TRT_RL_TEST_DIR']}/hung"):
        open(f"{os.environ['TRT_RL_TEST_DIR']}/hung", "w").close()
        time.sleep(3600)
    return float(kind == 3)


def sums(size: int, seed: int) -> list[dict]:
    """The quickstart's question without reasoning-gym, for machines that lack it."""
    import random

    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        rows.append({"prompt": f"State the final answer to the following arithmetic problem: {a} + {b} =", "answer": str(a + b)})
    return rows


def exact(response: str, row: dict) -> float:
    return float(response.strip() == row["answer"])


def brackets(response: str, row: dict) -> float:
    raise ValueError("no [/INST] in the response")


def verl_rows(size: int = 32) -> list[dict]:
    """Rows in the columns of the files that DAPO's authors published."""
    return [{"prompt": row["prompt"], "reward_model": {"ground_truth": row["answer"], "style": "rule"}} for row in sums(size, 0)]


def gsm8k_rows(split: str) -> list[dict]:
    """As `trt_rl.data.gsm8k` would, without the hub."""
    return sums({"train": 32, "test": 8}[split], 0)
