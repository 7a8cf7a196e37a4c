"""Exact mathematics: the answer in the response equals the row's, as math-verify judges it."""

from __future__ import annotations

from typing import Any


def score(response: str, row: dict[str, Any], answer_key: str = "answer") -> float:
    """1 if the last expression or boxed answer of `response` equals `row[answer_key]`, else 0."""
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{row[answer_key]}}}", parsing_timeout=None)
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
