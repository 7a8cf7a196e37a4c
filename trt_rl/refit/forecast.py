"""What a route will cost, before anything runs: bytes per link, buckets, memory, and a prediction of seconds. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from trt_rl.refit.route import Placement, Route


@dataclass(frozen=True)
class Speeds:
    """GB/s that the prediction assumes."""

    inside_node: float = 350.0
    """A GPU's NVLink in one direction; measured with NCCL on H200, see benchmarks/."""
    between_nodes: float = 45.0
    """One 400 Gb/s adapter a GPU, assumed."""
    quantize: float = 1000.0
    """FP8 bytes made a second; a third of what the fused quantizer moves on H200."""


def forecast(route: Route, placement: Placement, speeds: Speeds) -> dict[str, Any]:
    """Figures of `route`; `predicted_s` is a projection from `speeds`; the rest is exact for gloo and nccl. Disk writes
    each bucket once, ipc lends the sender's buffers, and delta sends less.

    The prediction adds, round by round, the slowest transfer, and puts the first bucket's quantization before them.
    Checks, launches, verification and pauses come on top.
    """
    node = placement.trainer + placement.engine
    links: Counter[tuple[int, int]] = Counter()
    crossing = inside = 0
    slowest: dict[int, float] = {}
    into_nodes: Counter[int] = Counter()
    for round, source, target, nbytes in route.transfers():
        links[source, target] += nbytes
        crosses = node[source] != node[target]
        crossing, inside = crossing + nbytes * crosses, inside + nbytes * (not crosses)
        if crosses:
            into_nodes[node[target]] += nbytes
        seconds = nbytes / 1e9 / (speeds.between_nodes if crosses else speeds.inside_node)
        slowest[round] = max(seconds, slowest.get(round, 0.0))
    members = range(route.trainers + route.engines)
    largest = max((b.nbytes for b in route.buckets), default=0)
    sent = {m: sum(n for (s, _), n in links.items() if s == m) for m in range(route.trainers)}
    return {
        "buckets": len(route.buckets),
        "rounds": len(slowest),
        "slices": sum(len(b.slices) for b in route.buckets),
        "largest_bucket_bytes": largest,
        "bytes_sent_by_trainer": sum(sent.values()),
        "bytes_of_busiest_trainer_rank": max(sent.values(), default=0),
        "bytes_inside_nodes": inside,
        "bytes_between_nodes": crossing,
        "bytes_into_node": {str(n): b for n, b in sorted(into_nodes.items())},
        "bytes_by_link": {f"{_name(route, s)} -> {_name(route, t)}": n for (s, t), n in sorted(links.items())},
        "extra_bytes_of_rank": {_name(route, m): 2 * route.slot_bytes(m) for m in members},
        "predicted_s": largest / 1e9 / speeds.quantize + sum(slowest.values()),
        "route": f"{route.digest:016x}",
    }


def _name(route: Route, member: int) -> str:
    return f"trainer {member}" if member < route.trainers else f"engine {member - route.trainers}"
