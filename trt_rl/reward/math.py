"""Exact mathematics: the answer in the response equals the row's, as math-verify judges it."""

from __future__ import annotations

from functools import reduce
from typing import Any


def score(response: str, row: dict[str, Any], answer_key: str = "answer") -> float:
    """1 if the last expression or boxed answer of `response` equals the row's answer, else 0.

    `answer_key` names its column, with dots into nested ones: `reward_model.ground_truth` in files prepared for verl.
    """
    from math_verify import parse, verify

    answer = reduce(lambda value, key: value[key], answer_key.split("."), row)
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
