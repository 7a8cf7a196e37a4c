"""Where the processes of a run live: Ray placement groups, one bundle a GPU (or a CPU, where there are none).

Ranks that talk most are neighbours: bundles are numbered node by node, so tensor-parallel groups of trainer and engine
stay inside a node where they fit. Colocated engines live in the trainer's bundles.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util import placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trt_rl.config import Recipe
from trt_rl.errors import RecipeError
from trt_rl.processes import gpus_per_actor
from trt_rl.rollout.capabilities import CAPABILITIES
from trt_rl.rollout.engine import Home

_TRAINER_SHARE = 0.5  # of a GPU, where engine workers take the other half of what Ray counts


@dataclass(frozen=True)
class Bundles:
    """A placement group, its bundles ordered by node."""

    group: PlacementGroup
    order: tuple[int, ...]
    nodes: tuple[str, ...]
    """Of each bundle, in that order."""

    @classmethod
    def reserve(cls, bundles: list[dict[str, float]], wait_s: float, what: str) -> Bundles:
        """Raises:
        RecipeError: the cluster cannot give them within `wait_s`.
        """
        group = placement_group(bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=wait_s)
        except GetTimeoutError:
            have = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            raise RecipeError(
                f"the Ray cluster did not give {len(bundles)} bundles of {bundles[0]} for {what} within {wait_s:.0f} s (free: {have}); "
                "use a smaller layout or a larger cluster"
            ) from None
        where = placement_group_table(group)["bundles_to_node_id"]
        first_seen = list(dict.fromkeys(where[i] for i in sorted(where)))
        order = sorted(where, key=lambda i: (first_seen.index(where[i]), i))
        return cls(group, tuple(order), tuple(where[i] for i in order))

    def strategy(self, at: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.order[at])


@dataclass(frozen=True)
class EnginePlace:
    """One replica."""

    options: dict[str, Any]
    """Of its Ray actor."""
    nodes: tuple[str, ...]
    """Of its ranks."""
    home: Home | None = None
    """For an engine that places its own workers."""
    shares: tuple[int, ...] | None = None
    """The trainer ranks on whose GPUs it lives, where its actor takes no GPU of its own."""


@dataclass(frozen=True)
class Places:
    """Of a whole run."""

    trainer: Bundles
    trainer_gpus: float
    engines: tuple[EnginePlace, ...]

    @classmethod
    def reserve(cls, recipe: Recipe) -> Places:
        """Reserve what the recipe needs.

        Raises:
            RecipeError: the cluster is too small, or a replica does not fit a node where it must.
        """
        world, wait_s = recipe.trainer.parallel.layout().world, recipe.run.wait_s
        engine, able = recipe.rollout.layout(), CAPABILITIES[recipe.rollout.engine]
        gpu = {"GPU": 1.0} if gpus_per_actor() else {}
        together = recipe.rollout.colocated
        trainer = Bundles.reserve([{"CPU": 2.0 if together else 1.0, **gpu}] * world, wait_s, "trainer ranks")
        share = _TRAINER_SHARE if gpu and together and able.places_workers else float(bool(gpu))
        found = []
        for replica in range(engine.replicas):
            at = range(replica * engine.tp, (replica + 1) * engine.tp)
            if together:
                found.append(_in_trainer(trainer, at, able.places_workers, bool(gpu)))
            elif able.places_workers:
                own = Bundles.reserve([{"CPU": 1.0, **gpu}] * engine.tp, wait_s, f"engine {replica}")
                found.append(EnginePlace(_beside(own.nodes[0]), own.nodes, Home(own.group, own.order)))
            else:
                found.append(_alone(recipe, replica, engine.tp, bool(gpu)))
        return cls(trainer, share, tuple(found))

    def summary(self) -> str:
        """Which ranks live on which Ray node."""
        trainer, engines = self.numbered()
        nodes = list(dict.fromkeys((*self.trainer.nodes, *(node for place in self.engines for node in place.nodes))))
        lines = []
        for i, node in enumerate(nodes):
            of = {kind: [r for r, n in enumerate(at) if n == i] for kind, at in (("trainer", trainer), ("engine", engines))}
            held = [f"{kind} ranks {', '.join(map(str, ranks))}" for kind, ranks in of.items() if ranks]
            lines.append(f"node {node[:12]}: {'; '.join(held)}")
        return "\n".join(lines)

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Of the Ray actor of a trainer rank."""
        return {"num_cpus": 1, "num_gpus": self.trainer_gpus, "scheduling_strategy": self.trainer.strategy(rank)}

    def numbered(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Node of every trainer rank and of every engine rank, as numbers."""
        engines = [node for place in self.engines for node in place.nodes]
        number = {node: i for i, node in enumerate(dict.fromkeys((*self.trainer.nodes, *engines)))}
        return tuple(number[n] for n in self.trainer.nodes), tuple(number[n] for n in engines)


def _beside(node: str) -> dict[str, Any]:
    """An actor on `node` that computes nothing itself: workers meet at the node of the process that owns the engine."""
    return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _in_trainer(trainer: Bundles, at: range, places_workers: bool, on_gpu: bool) -> EnginePlace:
    nodes = tuple(trainer.nodes[i] for i in at)
    if places_workers:
        home = Home(trainer.group, tuple(trainer.order[i] for i in at), 1 - _TRAINER_SHARE if on_gpu else None)
        return EnginePlace(_beside(nodes[0]), nodes, home)
    if len(set(nodes)) > 1:
        raise RecipeError(
            f"an engine of {len(nodes)} ranks would span {len(set(nodes))} nodes; this engine keeps a replica on one, use trtllm"
        )
    return EnginePlace(_beside(nodes[0]), nodes, shares=tuple(at))


def _alone(recipe: Recipe, replica: int, tp: int, on_gpu: bool) -> EnginePlace:
    """A replica whose actor holds all its GPUs, on one node; or vLLM's own Ray workers in a bundle each, on any."""
    if recipe.rollout.engine == "vllm" and recipe.rollout.vllm.get("distributed_executor_backend") == "ray":
        own = Bundles.reserve([{"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {})}] * tp, recipe.run.wait_s, f"engine {replica}")
        inside = PlacementGroupSchedulingStrategy(own.group, own.order[0], placement_group_capture_child_tasks=True)
        return EnginePlace({"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": inside}, own.nodes)
    need = {"CPU": 1.0, "GPU": float(tp)} if on_gpu else {"CPU": float(tp)}
    largest = max((node["Resources"].get("GPU" if on_gpu else "CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if largest < tp:
        raise RecipeError(
            f"rollout.parallel.tp = {tp}: engine {recipe.rollout.engine!r} keeps a replica on one node, and the largest has {largest:.0f} "
            f"{'GPUs' if on_gpu else 'CPUs'}; lower it, use trtllm, or set rollout.vllm.distributed_executor_backend = ray"
        )
    own = Bundles.reserve([need], recipe.run.wait_s, f"engine {replica}")
    options = {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0), "scheduling_strategy": own.strategy(0)}
    return EnginePlace(options, own.nodes * tp)


def see_gpus(own: list[str], others: list[str]) -> None:
    """Show this process `own` GPUs first and `others` of the node after them, before CUDA is initialized."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*own, *(gpu for gpu in others if gpu not in own)])
