"""How many machines a recipe needs. The recipe itself is checked by `trt_rl.plan`."""

from __future__ import annotations

from trt_rl.config import Recipe


def ranks(recipe: Recipe) -> int:
    """GPUs (or, without any, CPUs) that the run takes."""
    trainer, engines = recipe.trainer.parallel.layout().world, recipe.rollout.layout().world
    return trainer if recipe.rollout.colocated else trainer + engines


def shortage(recipe: Recipe, nodes: int, gpus_per_node: int, cpus_per_node: int | None) -> list[str]:
    """What `nodes` machines lack for the recipe."""
    rollout, trainer = recipe.rollout, recipe.trainer.parallel.layout().world
    need = ranks(recipe)
    of = f"trainer.parallel takes {trainer}, " + (
        "engines share them" if rollout.colocated else f"rollout.parallel times replicas {rollout.layout().world}"
    )
    if gpus_per_node:
        have = nodes * gpus_per_node
        if have < need:
            return [
                f"--nodes {nodes} * --gpus-per-node {gpus_per_node} = {have} GPUs, the recipe needs {need} ({of}); use {_more(need, gpus_per_node)}"
            ]
    elif cpus_per_node:
        need *= 2 if rollout.colocated else 1
        have = nodes * cpus_per_node
        if have < need:
            return [
                f"--nodes {nodes} * --cpus-per-node {cpus_per_node} = {have} CPUs, the recipe needs {need} ({of}); use {_more(need, cpus_per_node)}"
            ]
    return []


def _more(need: int, each: int) -> str:
    return f"--nodes {-(-need // each)}"
