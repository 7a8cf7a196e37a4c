"""The whole plan of a recipe: where ranks sit, what they hold, what a refit moves, how long a step may take, what is wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from trt_rl.arch import Arch
from trt_rl.config import Recipe
from trt_rl.errors import ModelError, RecipeError
from trt_rl.plan.checks import cluster_violations, violations
from trt_rl.plan.counts import Counts, of_stages
from trt_rl.plan.gpus import GPUS, speeds_of
from trt_rl.plan.megatron import config_fields
from trt_rl.plan.memory import EngineMemory, TrainerMemory, engine_rank, trainer_stages
from trt_rl.plan.memory import violations as memory_violations
from trt_rl.plan.projection import Rates, most_at_once, project
from trt_rl.plan.refit import moved
from trt_rl.plan.seating import Seating
from trt_rl.refit.forecast import Speeds
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
    seating = Seating.of(layout, engine, recipe.cluster.gpus_per_node or layout.world + engine.world, recipe.rollout.colocated)
    crossing = seating.crossing(layout, engine)
    plan.cluster = {
        "gpu": recipe.cluster.gpu,
        "gpus": seating.gpus,
        "nodes": seating.nodes,
        "gpus_per_node": recipe.cluster.gpus_per_node,
        "ranks_by_node": seating.by_node(),
        "groups_crossing_nodes": crossing,
    }
    if recipe.cluster.gpus_per_node:
        plan.violations += cluster_violations(recipe, seating)
    if recipe.trainer.megatron and not config_fields():
        plan.notes.append("Megatron-core is not installed here: the names in trainer.megatron were not checked")
    table = PrecisionTable.build(arch, recipe.refit.policy())
    speeds = speeds or speeds_of(gpu)
    traffic = moved(recipe, arch, table, seating, speeds)
    slot = max(traffic["extra_bytes_of_rank"].values()) // 2
    plan.refit = {"format": recipe.refit.format, "precision": table.summary(), "trainer": str(layout), "engine": str(engine)} | traffic

    if not recipe.cluster.gpus_per_node:
        plan.notes.append("cluster.gpus_per_node = 0 runs on CPUs; memory and time are planned for GPUs only")
        return plan
    try:
        _plan_gpus(plan, recipe, arch, table, slot, rates or Rates(), "engine tp" not in crossing)
    except RecipeError as error:
        plan.violations.append(str(error))
    plan.notes += [
        f"{name} groups span {nodes} nodes: every layer waits for the network"
        for name, nodes in crossing.items()
        if name in ("trainer tp", "trainer etp", "engine tp")
    ]
    return plan


def _plan_gpus(plan: Plan, recipe: Recipe, arch: Arch, table: PrecisionTable, slot: int, rates: Rates, inside: bool) -> None:
    gpu = GPUS[recipe.cluster.gpu]
    stages = trainer_stages(recipe, arch, slot)
    worst = max(stages, key=lambda stage: stage.total)
    beside = worst.at_start(recipe.trainer.precision, recipe.trainer.offload) if recipe.rollout.colocated else 0.0
    served = engine_rank(recipe, arch, table, gpu.memory_gib, beside, slot)
    plan.memory_gib = _memory(recipe, gpu.memory_gib, stages, worst, served)
    plan.violations += memory_violations(recipe, arch, gpu.memory_gib, worst, served, slot)
    asked = -(-recipe.rollout.prompts_per_step * recipe.rollout.group_size // recipe.rollout.replicas)
    if 0 < served.sequences < min(asked, most_at_once(recipe)):
        plan.notes.append(
            f"the KV cache of a replica holds {served.sequences} sequences of full length; {asked} are asked for at once, the rest waits"
        )
    plan.projection = project(recipe, arch, gpu, rates, served, plan.refit["predicted_s"], inside)


def _memory(recipe: Recipe, memory_gib: float, stages: list[TrainerMemory], worst: TrainerMemory, engine: EngineMemory) -> dict[str, Any]:
    def rounded(part) -> dict[str, Any]:
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(part).items()} | {"total": round(part.total, 2)}

    found = {
        "of_a_gpu": memory_gib,
        "trainer": rounded(worst) | {"stage": stages.index(worst)},
        "engine": rounded(engine),
    }
    if recipe.rollout.colocated:
        resident = worst.resident(recipe.trainer.offload)
        found["colocated"] = {
            "trainer_resident": round(resident, 2),
            "trainer_offloaded": round(worst.offloaded(recipe.trainer.offload), 2),
            "engine_awake": round(engine.total, 2),
            "generating": round(resident + engine.total, 2),
        }
    return found
