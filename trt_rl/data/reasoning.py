"""Tasks of reasoning-gym as rows: generated on the spot, endless in variety, each with its own verifier."""

from __future__ import annotations

from typing import Any


def rows(task: str, size: int, seed: int, **options: Any) -> list[dict[str, Any]]:
    """`size` rows of `task`: `prompt`, `answer` and the whole `entry`, which the verifier needs.

    `options` are the task's own, e.g. `max_digits` of `chain_sum`.
    """
    import reasoning_gym

    data = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    return [{"prompt": entry["question"], "answer": entry["answer"], "entry": entry} for entry in data]
