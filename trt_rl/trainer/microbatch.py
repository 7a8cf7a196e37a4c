"""Which rows of a global batch each data-parallel rank computes, in which micro-batches. Pure arithmetic.

Every rank computes the same plan from the same lengths, so no communication is needed, and the log-prob
pass and the training pass see identical micro-batches: that is what makes `ppo_kl` exactly 0 on the first step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """`rows` of the global batch, padded to `width` tokens each. Empty rows keep data-parallel ranks in step."""

    rows: tuple[int, ...]
    width: int


def plan_microbatches(lengths: list[int], replicas: int, token_budget: int, multiple: int) -> list[list[MicroBatch]]:
    """Micro-batches of every data-parallel replica, the same number for each.

    Rows are dealt from longest to shortest in alternating direction, which balances tokens; each
    micro-batch takes as many rows as `rows * width <= token_budget` allows, at least one.

    Args:
        lengths: tokens of every row.
        replicas: data-parallel size.
        token_budget: padded tokens a micro-batch may hold.
        multiple: `width` is a multiple of this (tensor and context parallelism cut the sequence).
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    for turn, row in enumerate(order):
        lap, seat = divmod(turn, replicas)
        dealt[seat if lap % 2 == 0 else replicas - 1 - seat].append(row)

    plans = []
    for rows in dealt:
        plan, start = [], 0
        while start < len(rows):
            width = -(-lengths[rows[start]] // multiple) * multiple
            count = max(1, token_budget // width)
            plan.append(MicroBatch(tuple(rows[start : start + count]), width))
            start += count
        plans.append(plan)
    longest = max(map(len, plans))
    for plan in plans:
        plan.extend([MicroBatch((), multiple)] * (longest - len(plan)))
    return plans
