"""A tiny task for tests: the answer is right if it has an even number of tokens... of text."""

from __future__ import annotations


def rows(size: int = 32) -> list[dict]:
    return [{"prompt": f"{chr(97 + i % 26)}{chr(97 + i // 26)}", "answer": i} for i in range(size)]


def score(response: str, row: dict) -> float:
    return float(len(response) % 2 == 0)
