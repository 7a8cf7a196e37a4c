"""What a number of machines lacks for a recipe, whether or not its model is on this one."""

from __future__ import annotations

from trt_rl.config import Recipe
from trt_rl.plan import Seating, cluster_violations


def nodes(recipe: Recipe, gpus_per_node: int) -> int:
    """As many as the recipe's layouts fill; one, without GPUs."""
    if not gpus_per_node:
        return 1
    return Seating.of(recipe.trainer.parallel.layout(), recipe.rollout.layout(), gpus_per_node, recipe.rollout.colocated).nodes


def shortage(recipe: Recipe, cpus_per_node: int | None) -> list[str]:
    """Empty, or why `recipe.cluster` is too small; without GPUs (`gpus_per_node` 0) CPUs are counted, where their number is known."""
    cluster, rollout, trainer = recipe.cluster, recipe.rollout, recipe.trainer.parallel.layout()
    if cluster.gpus_per_node:
        seating = Seating.of(trainer, rollout.layout(), cluster.gpus_per_node, rollout.colocated)
        return list(cluster_violations(recipe, seating))
    nodes, need = cluster.nodes or 1, 2 * trainer.world if rollout.colocated else trainer.world + rollout.layout().world
    if cpus_per_node is None or nodes * cpus_per_node >= need:
        return []
    engines = "engines as many beside them" if rollout.colocated else f"rollout.parallel times replicas {rollout.layout().world}"
    return [
        f"--nodes {nodes} * --cpus-per-node {cpus_per_node} = {nodes * cpus_per_node} CPUs, the recipe needs {need} (trainer.parallel takes "
        f"{trainer.world}, {engines}); use --nodes {-(-need // cpus_per_node)}"
    ]
