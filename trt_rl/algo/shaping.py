"""Reward shaping that depends on the length of a response."""

from __future__ import annotations


def overlong_penalty(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """Soft overlong punishment: 0 up to `max_tokens - buffer`, then linear down to `-penalty` at `max_tokens`.

    DAPO, Yu et al., arXiv 2503.14476, equation 13. Lengths in tokens.
    """
    excess = length - (max_tokens - buffer)
    return 0.0 if excess <= 0 else -penalty * min(excess / buffer, 1.0)
