"""Dynamic sampling: train only on groups that carry a signal, and on exactly as many as were asked for."""

from __future__ import annotations

from collections.abc import Sequence


def informative(rewards: Sequence[float | None]) -> bool:
    """Whether a group's advantages are not all zero: at least two valid rewards that differ.

    `None` marks a sample whose reward function failed. DAPO, Yu et al., arXiv 2503.14476, section 3.2.
    """
    valid = {r for r in rewards if r is not None}
    return len(valid) > 1
