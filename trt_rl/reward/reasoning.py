"""reasoning-gym's own verifier as a reward."""

from __future__ import annotations

from typing import Any


def score(response: str, row: dict[str, Any]) -> float:
    """The task's score of `response`, stripped of white space: 1 for a right answer, less for a wrong one."""
    import reasoning_gym

    entry = row["entry"]
    return reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(response.strip(), entry)
