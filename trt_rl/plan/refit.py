"""What a refit moves: from the route itself, or for large models extrapolated from the routes of small ones in the same layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import lcm, prod
from typing import Any

from trt_rl.arch import Arch
from trt_rl.config import Recipe
from trt_rl.plan.checks import route_of
from trt_rl.plan.seating import Seating
from trt_rl.refit.forecast import Speeds, forecast
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.route import DTYPE_BYTES

_EXACT_BELOW = 60_000  # tensors times ranks; above, an exact route takes longer than a plan may
_SUMS = (
    "bytes_sent_by_trainer",
    "bytes_of_busiest_trainer_rank",
    "bytes_inside_nodes",
    "bytes_between_nodes",
    "bytes_into_node",
    "bytes_by_link",
)


def moved(recipe: Recipe, arch: Arch, table: PrecisionTable, seating: Seating, speeds: Speeds) -> dict[str, Any]:
    """The figures of `forecast`; `exact` says whether they are the route's own.

    If not, bytes follow from three small models, for they are linear in layers and in layers times experts, as far as
    replicas share the sending evenly; what single layers hold otherwise (dense layers, layers in BF16) is spread over
    all. Seconds are those of the busiest rank, at full speed all the time.
    """
    layout, engine, placement = recipe.trainer.parallel.layout(), recipe.rollout.layout(), seating.placement()
    tensors = arch.layers * (8 + 3 * arch.experts)
    if tensors * (layout.world + engine.world) <= _EXACT_BELOW:
        return forecast(route_of(recipe, arch, table, placement), placement, speeds) | {"exact": True}
    everywhere = replace(recipe.refit.policy(), exclude=(), bf16_first_layers=0, bf16_last_layers=0)  # smaller models lack these layers
    deep, few = layout.pp, lcm(layout.ep, engine.ep) if arch.experts else 0

    def small(layers: int, experts: int) -> dict[str, Any]:
        model = arch.shrunk(layers, experts)
        its = PrecisionTable.build(model, everywhere)
        return forecast(route_of(recipe, model, its, placement), placement, speeds) | {"wire": _wire_bytes(its)}

    one, deeper = small(deep, few), small(2 * deep, few)
    wider = small(deep, 2 * few) if arch.experts else one
    stages, breadth = arch.layers / deep, arch.experts / few - 1 if few else 0.0

    def scaled(a: Any, b: Any, c: Any) -> Any:
        if isinstance(a, dict):
            return {key: scaled(a.get(key, 0), b.get(key, 0), c.get(key, 0)) for key in dict.fromkeys((*a, *b, *c))}
        return round(a + (stages - 1) * (b - a) + stages * breadth * (c - a))

    true = _wire_bytes(table) / scaled(one["wire"], deeper["wire"], wider["wire"])

    def corrected(value: Any) -> Any:
        return {key: corrected(part) for key, part in value.items()} if isinstance(value, dict) else round(value * true)

    found = {key: corrected(scaled(one[key], deeper[key], wider[key])) for key in _SUMS}
    bucket = recipe.refit.bucket_mib << 20
    busiest = _busiest(found["bytes_by_link"], seating, speeds)
    return found | {
        "largest_bucket_bytes": bucket,
        "extra_bytes_of_rank": dict.fromkeys(one["extra_bytes_of_rank"], 2 * bucket),
        "predicted_s": bucket / 1e9 / speeds.quantize + busiest,
        "exact": False,
    }


def _wire_bytes(table: PrecisionTable) -> int:
    """Of one copy of the model as a refit sends it."""
    return sum(DTYPE_BYTES[dtype] * prod(shape) for dtype, shape in table.wire_tensors().values())


def _busiest(links: dict[str, int], seating: Seating, speeds: Speeds) -> float:
    """Seconds of the rank that sends or receives longest."""
    node = {f"trainer {r}": n for r, (n, _) in enumerate(seating.trainer)} | {f"engine {r}": n for r, (n, _) in enumerate(seating.engine)}
    seconds: Counter[tuple[str, str]] = Counter()
    for link, nbytes in links.items():
        source, target = link.split(" -> ")
        takes = nbytes / 1e9 / (speeds.inside_node if node[source] == node[target] else speeds.between_nodes)
        seconds["out", source] += takes
        seconds["in", target] += takes
    return max(seconds.values(), default=0.0)
