"""The whole plan of a recipe: where ranks sit, what they hold, what a refit moves, how long a step may take, what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import lcm
from typing import Any

from trt_rl.arch import Arch
from trt_rl.config import Recipe
from trt_rl.errors import ModelError
from trt_rl.plan.checks import cluster_violations, route_of, violations
from trt_rl.plan.counts import Counts, of_stages
from trt_rl.plan.gpus import GPUS, LINK_SHARE, NETWORK_SHARE
from trt_rl.plan.memory import EngineMemory, TrainerMemory, engine_rank, trainer_stages
from trt_rl.plan.memory import violations as memory_violations
from trt_rl.plan.projection import Rates, project
from trt_rl.plan.seating import Seating
from trt_rl.refit.forecast import Speeds, forecast
from trt_rl.refit.precision import PrecisionTable


@dataclass
class Plan:
    """Sections are empty where violations leave nothing to compute."""

    name: str
    violations: list[str]
    notes: list[str] = field(default_factory=list)
    cluster: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    memory_gib: dict[str, Any] = field(default_factory=dict)
    refit: dict[str, Any] = field(default_factory=dict)
    projection: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(recipe: Recipe, rates: Rates | None = None, speeds: Speeds | None = None) -> Plan:
    """Everything about `recipe` that follows from sizes; never raises for what is wrong with it."""
    found = list(violations(recipe))
    plan = Plan(recipe.name, found)
    try:
        arch = Arch.load(recipe.model.path)
    except ModelError:
        return plan  # named already
    layout, engine = recipe.trainer.parallel.layout(), recipe.rollout.layout()
    gpu = GPUS[recipe.cluster.gpu]
    counts = Counts.of(arch)
    plan.parameters = {"model": asdict(counts)}
    if found:
        return plan
    plan.parameters["trainer_rank_of_stage"] = [asdict(c) | {"total": c.total} for c in of_stages(arch, layout)]
    seating = Seating.of(layout, engine, recipe.cluster.gpus_per_node, recipe.rollout.colocated)
    crossing = seating.crossing(layout, engine)
    plan.cluster = {
        "gpu": recipe.cluster.gpu,
        "gpus": seating.gpus,
        "nodes": seating.nodes,
        "gpus_per_node": recipe.cluster.gpus_per_node,
        "ranks_by_node": seating.by_node(),
        "groups_crossing_nodes": crossing,
    }
    plan.violations += cluster_violations(recipe, seating)
    table = PrecisionTable.build(arch, recipe.refit.policy())
    placement = seating.placement()
    speeds = speeds or Speeds(gpu.nvlink_gb_s * LINK_SHARE, gpu.network_gb_s * NETWORK_SHARE)

    def figures(smaller: Arch) -> dict[str, Any]:
        its = table if smaller is arch else PrecisionTable.build(smaller, _everywhere(recipe))
        return forecast(route_of(recipe, smaller, its, placement), placement, speeds)

    moved = _scaled(arch, layout, engine, figures)
    extra = moved.pop("extra_bytes_of_rank")
    plan.refit = {"format": recipe.refit.format, "precision": table.summary(), "trainer": str(layout), "engine": str(engine)} | moved
    slot = recipe.refit.bucket_mib << 20 if not moved["exact"] else max(extra.values()) // 2
    plan.refit["extra_bytes_of_a_rank"] = 2 * slot

    stages = trainer_stages(recipe, arch, slot)
    worst = max(stages, key=lambda stage: stage.total)
    beside = worst.resident if recipe.rollout.colocated else 0.0
    served = engine_rank(recipe, arch, table, gpu.memory_gib, beside, slot)
    plan.memory_gib = _memory(recipe, gpu.memory_gib, stages, worst, served)
    plan.violations += memory_violations(recipe, arch, gpu.memory_gib, worst, served, slot)
    plan.notes += _notes(recipe, crossing, served)
    plan.projection = project(recipe, arch, gpu, rates or Rates(), served, plan.refit["predicted_s"], "engine tp" not in crossing)
    return plan


def _everywhere(recipe: Recipe):
    """The policy without what names single layers, which a smaller model lacks."""
    return replace(recipe.refit.policy(), exclude=(), bf16_first_layers=0, bf16_last_layers=0)


_EXACT_BELOW = 60_000  # tensors times ranks; above, an exact route takes longer than a plan may


def _scaled(arch: Arch, layout, engine, figures: Callable[[Arch], dict[str, Any]]) -> dict[str, Any]:
    """Figures of the refit's route; of large models extrapolated from models of few layers and experts in the same layout.

    Bytes are linear in layers, and in layers times experts, so three small models give them.
    """
    tensors = arch.layers * (8 + 3 * arch.experts)
    if tensors * (layout.world + engine.world) <= _EXACT_BELOW:
        return figures(arch) | {"exact": True}
    deep = layout.pp
    few = lcm(layout.ep, engine.ep) if arch.experts else 0

    def small(layers: int, experts: int) -> dict[str, Any]:
        return figures(arch.shrunk(layers, experts))

    one, two = small(deep, few), small(2 * deep, few)
    wide = small(deep, 2 * few) if arch.experts else one
    times, breadth = arch.layers / deep - 1, (arch.experts / few - 1) if few else 0

    def value(a: float, b: float, c: float) -> float:
        layer, expert = b - a, c - a  # of one more layer a stage with few experts; of as many experts again
        return a + times * layer + (times + 1) * breadth * expert

    def combine(a: Any, b: Any, c: Any) -> Any:
        if isinstance(a, dict):
            return {key: combine(a.get(key, 0), b.get(key, 0), c.get(key, 0)) for key in dict.fromkeys((*a, *b, *c))}
        return value(a, b, c) if isinstance(a, float) else round(value(a, b, c))

    summed = (
        "bytes_sent_by_trainer",
        "bytes_of_busiest_trainer_rank",
        "bytes_inside_nodes",
        "bytes_between_nodes",
        "bytes_into_node",
        "bytes_by_link",
        "predicted_s",
    )
    return {key: combine(one[key], two[key], wide[key]) for key in summed} | {
        "extra_bytes_of_rank": one["extra_bytes_of_rank"],
        "exact": False,
    }


def _memory(recipe: Recipe, memory_gib: float, stages: list[TrainerMemory], worst: TrainerMemory, engine: EngineMemory) -> dict[str, Any]:
    def rounded(part) -> dict[str, Any]:
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(part).items()} | {"total": round(part.total, 2)}

    found = {
        "of_a_gpu": memory_gib,
        "trainer": rounded(worst) | {"stage": stages.index(worst)},
        "engine": rounded(engine),
    }
    if recipe.rollout.colocated:
        found["colocated"] = {
            "trainer_resident": round(worst.resident, 2),
            "engine_awake": round(engine.total, 2),
            "generating": round(worst.resident + engine.total, 2),
        }
    return found


def _notes(recipe: Recipe, crossing: dict[str, int], engine: EngineMemory) -> list[str]:
    notes = [
        f"{name} groups span {nodes} nodes: every layer waits for the network"
        for name, nodes in crossing.items()
        if name in ("trainer tp", "trainer etp", "engine tp")
    ]
    wanted = -(-recipe.rollout.prompts_per_step * recipe.rollout.group_size // recipe.rollout.replicas)
    if 0 < engine.sequences < min(wanted, 256):
        notes.append(
            f"the KV cache of a replica holds {engine.sequences} sequences of full length; {wanted} are asked for at once, the rest waits"
        )
    return notes
