"""Everything about a recipe that can be known before a process starts. No GPU, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Any

from trt_rl.arch import Arch
from trt_rl.config import OWNED_ENGINE, OWNED_MEGATRON, Recipe
from trt_rl.errors import ModelError, RecipeError, RefitError
from trt_rl.layout import divisors
from trt_rl.plan.gpus import GPUS
from trt_rl.plan.megatron import unknown_fields
from trt_rl.plan.seating import Seating
from trt_rl.refit.engine_shards import violations as engine_violations
from trt_rl.refit.precision import BLOCK, PrecisionTable
from trt_rl.refit.route import RELAYING, Placement, Route
from trt_rl.rollout.capabilities import CAPABILITIES


def check(recipe: Recipe) -> Arch:
    """The recipe's model, if nothing is wrong with the recipe.

    Raises:
        RecipeError: lists every violation with the values that would work.
    """
    if found := list(violations(recipe)):
        raise RecipeError(cannot_run(found))
    return Arch.load(recipe.model.path)


def cannot_run(found: list[str]) -> str:
    return f"the recipe cannot run: {len(found)} problem(s)\n" + "\n".join(f"  - {line}" for line in found)


def violations(recipe: Recipe) -> Iterator[str]:
    """What is wrong between the recipe and its model, and within the recipe."""
    yield from recipe_violations(recipe)
    try:
        arch = Arch.load(recipe.model.path)
        yield from arch.layout_violations(recipe.trainer.parallel.layout())
        yield from _model_violations(recipe, arch)
    except ModelError as error:
        yield str(error)


def cluster_violations(recipe: Recipe, seating: Seating) -> Iterator[str]:
    """What is wrong between the recipe's layout and `cluster`."""
    cluster, rollout = recipe.cluster, recipe.rollout
    if cluster.nodes is not None and seating.nodes > cluster.nodes:
        have = cluster.nodes * cluster.gpus_per_node
        yield (
            f"trainer.parallel takes {len(seating.trainer)} GPUs and rollout {len(seating.engine)}{' of the same' if rollout.colocated else ''}: "
            f"{seating.nodes} nodes of {cluster.gpus_per_node}, but cluster.nodes (--nodes of a launch) = {cluster.nodes}, {have} GPUs; "
            f"set cluster.nodes = {seating.nodes}, or lower trainer.parallel.dp or rollout.replicas"
        )
    able = CAPABILITIES[rollout.engine]
    spans = rollout.engine == "vllm" and rollout.vllm.get("distributed_executor_backend") == "ray" and not rollout.colocated
    if "engine tp" in seating.crossing(recipe.trainer.parallel.layout(), rollout.layout()) and not (able.places_workers or spans):
        works = [d for d in divisors(rollout.parallel.tp) if cluster.gpus_per_node % d == 0]
        also = "" if rollout.colocated else ", or rollout.vllm.distributed_executor_backend = ray"
        yield (
            f"rollout.parallel.tp = {rollout.parallel.tp}: engine {rollout.engine!r} keeps a replica on one node, and nodes have "
            f"{cluster.gpus_per_node} GPUs; works: tp of {', '.join(map(str, works))} with more replicas, engine trtllm{also}"
        )
    if recipe.refit.format != "bf16" and not GPUS[cluster.gpu].fp8_tflops:
        yield f"refit.format = {recipe.refit.format}: cluster.gpu = {cluster.gpu} has no FP8 tensor cores; set bf16"


def recipe_violations(recipe: Recipe) -> Iterator[str]:
    """What is wrong within the recipe, whatever its model."""
    rollout, trainer, algo = recipe.rollout, recipe.trainer, recipe.algo
    yield from trainer.parallel.layout().violations()
    samples = rollout.prompts_per_step * rollout.group_size
    if samples % trainer.mini_batches:
        works = [d for d in divisors(samples) if d <= 64]
        yield (
            f"trainer.mini_batches = {trainer.mini_batches} does not divide the {samples} samples of a step "
            f"(rollout.prompts_per_step * group_size); works: {works}"
        )
    if algo.dynamic_sampling.enabled and algo.dynamic_sampling.on_shortfall == "train" and trainer.mini_batches > 1:
        yield "algo.dynamic_sampling.on_shortfall = train may leave any number of samples; set trainer.mini_batches = 1 or on_shortfall = stop"
    if rollout.sampling.temperature == 0:
        yield "rollout.sampling.temperature = 0 is greedy: all samples of a group are equal and nothing is learned; use 1.0"
    if rollout.sampling.top_p < 1 or rollout.sampling.top_k:
        yield (
            f"rollout.sampling.top_p = {rollout.sampling.top_p}, top_k = {rollout.sampling.top_k}: the trainer's log-probs are "
            "under the full distribution; use top_p = 1.0 and top_k = 0 for training (rollout.validation may truncate)"
        )
    overlong = algo.overlong
    if overlong.enabled and overlong.buffer_tokens > rollout.sampling.max_tokens:
        yield (
            f"algo.overlong.buffer_tokens = {overlong.buffer_tokens} exceeds rollout.sampling.max_tokens = "
            f"{rollout.sampling.max_tokens}; use at most that"
        )
    if trainer.optimizer.min_lr > trainer.optimizer.lr:
        yield f"trainer.optimizer.min_lr = {trainer.optimizer.min_lr} exceeds lr = {trainer.optimizer.lr}"
    if recipe.refit.transport == "ipc" and not rollout.colocated:
        yield "refit.transport = ipc needs engines on the trainer's GPUs; set rollout.colocated = true, or use nccl or auto"
    yield from _colocation_violations(recipe)
    if recipe.refit.delta and recipe.refit.transport in ("ipc", "disk"):
        yield f"refit.delta = true works with refit.transport gloo or nccl, not {recipe.refit.transport}; turn one of them off"
    for key in trainer.megatron.keys() & OWNED_MEGATRON.keys():
        yield f"trainer.megatron.{key} is set by trt_rl from {OWNED_MEGATRON[key]}; remove it"
    yield from unknown_fields(trainer.megatron)
    yield from _recompute_violations(trainer.megatron)
    for engine, owned in OWNED_ENGINE.items():
        for key in getattr(rollout, engine).keys() & owned.keys():
            yield f"rollout.{engine}.{key} is set by trt_rl from {owned[key]}; remove it"


def _recompute_violations(megatron: dict[str, Any]) -> Iterator[str]:
    allowed = {"recompute_granularity": ("full", "selective", None), "recompute_method": ("uniform", "block", None)}
    for key, values in allowed.items():
        if megatron.get(key) not in values:
            yield f"trainer.megatron.{key} = {megatron[key]!r}; works: {', '.join(v for v in values if v)}"
    layers = megatron.get("recompute_num_layers", 1)
    if layers is not None and (not isinstance(layers, int) or layers < 1):
        yield f"trainer.megatron.recompute_num_layers = {layers!r}; use a whole number of layers from 1"


def _colocation_violations(recipe: Recipe):
    rollout, world = recipe.rollout, recipe.trainer.parallel.layout().world
    if not rollout.colocated:
        if recipe.trainer.offload:
            yield f"trainer.offload = {recipe.trainer.offload} makes room for engines on the trainer's GPUs; set rollout.colocated = true, or offload = []"
        return
    if not CAPABILITIES[rollout.engine].sleep:
        able = ", ".join(name for name, c in CAPABILITIES.items() if c.sleep)
        yield f"rollout.colocated = true: engine {rollout.engine!r} cannot sleep while the trainer works; engines that can: {able}"
    if rollout.layout().world != world:
        yield (
            f"rollout.colocated = true: rollout.parallel.tp * replicas = {rollout.layout().world} ranks live on the {world} GPUs of "
            f"trainer.parallel; make them equal (rollout.replicas = {max(1, world // rollout.parallel.tp)} at this tp)"
        )
    if recipe.refit.transport in ("nccl", "disk"):
        yield f"rollout.colocated = true refits through ipc; refit.transport = {recipe.refit.transport}: set auto"
    if recipe.refit.delta:
        yield "refit.delta = true needs the engine's last weights, which a sleeping engine gives up; turn one of them off (rollout.colocated)"


def _model_violations(recipe: Recipe, arch: Arch):
    longest = recipe.data.max_prompt_tokens + max(recipe.rollout.sampling.max_tokens, recipe.validation_sampling.max_tokens)
    if longest > arch.max_positions:
        yield (
            f"data.max_prompt_tokens + rollout max_tokens = {longest} exceeds the model's "
            f"max_position_embeddings = {arch.max_positions}; lower one of them"
        )
    engine, able = recipe.rollout.layout(), CAPABILITIES[recipe.rollout.engine]
    if recipe.rollout.engine == "trtllm" and "quantization_config" in recipe.rollout.trtllm.get("model_kwargs", {}):
        yield "rollout.trtllm.model_kwargs.quantization_config is set by trt_rl from refit; remove it"
    if recipe.rollout.engine == "sglang":
        for key, sampling in (("sampling", recipe.rollout.sampling), ("validation", recipe.validation_sampling)):
            if sampling.temperature and sampling.top_p < 1 and not sampling.top_k:
                yield f"rollout.{key}: top_p = {sampling.top_p} with top_k = 0: SGLang needs a top_k beside it; set top_k too (1024, say)"
    if recipe.rollout.parallel.pp > 1:
        yield (
            f"rollout.parallel.pp = {recipe.rollout.parallel.pp}: engines are cut by tp and ep, across nodes too; set pp = 1 and "
            f"tp = {engine.tp * recipe.rollout.parallel.pp}"
        )
    if recipe.refit.format not in able.formats:
        others = ", ".join(name for name, c in CAPABILITIES.items() if recipe.refit.format in c.formats)
        yield (
            f"refit.format = {recipe.refit.format}: engine {recipe.rollout.engine!r} holds {', '.join(able.formats)}; "
            f"use one of these, or an engine that holds it: {others}"
        )
    if engine.ep not in (1, engine.tp) and not able.any_ep:
        yield (
            f"rollout.parallel.ep = {engine.ep}: engine {recipe.rollout.engine!r} divides experts over all ranks of a replica or over none; "
            f"works: 1, {engine.tp}"
        )
    for key in ("max_model_len", "max_seq_len", "context_length"):
        limit = getattr(recipe.rollout, recipe.rollout.engine).get(key)
        if isinstance(limit, int) and limit < longest:
            yield (
                f"rollout.{recipe.rollout.engine}.{key} = {limit} is shorter than data.max_prompt_tokens + rollout max_tokens = {longest}; "
                f"use at least {longest}"
            )
    if engine.tp > 1 and not able.parallel:
        yield f"rollout.parallel.tp = {engine.tp}: engine {recipe.rollout.engine!r} is one process; set it to 1 and use rollout.replicas"
    try:
        table = PrecisionTable.build(arch, recipe.refit.policy())
        found = engine_violations(arch, engine, table.formats, BLOCK, able.fused)
        if not able.duplicates_scales and recipe.refit.format == "fp8_block" and engine.tp > arch.kv_heads and not arch.experts:
            found.append(
                f"rollout.parallel.tp = {engine.tp} repeats the model's {arch.kv_heads} KV heads, and {recipe.rollout.engine} does not "
                f"repeat their FP8 scales in dense models; use tp of at most {arch.kv_heads}, or refit.bf16_attention = true"
            )
        yield from found
        if not found and not arch.layout_violations(recipe.trainer.parallel.layout()):
            _fits_buckets(recipe, arch, table)
    except RefitError as error:
        yield str(error)


def _fits_buckets(recipe: Recipe, arch: Arch, table: PrecisionTable) -> None:
    """Try the route of a few layers; the others are like these.

    Raises:
        RefitError: one row of a tensor does not fit a bucket.
    """
    small = arch.shrunk(recipe.trainer.parallel.pp, lcm(recipe.trainer.parallel.ep, recipe.rollout.parallel.ep))
    router = ".mlp.gate.weight"  # of a layer that the model itself may not have as its first with experts
    its = {n: table.formats.get(n, "bf16" if n.endswith(router) else table.format) for n in small.hf_shapes()}
    route_of(recipe, small, PrecisionTable(table.policy, its, small.hf_shapes()), None)


def route_of(recipe: Recipe, arch: Arch, table: PrecisionTable, placement: Placement | None) -> Route:
    layout, engine, bucket = recipe.trainer.parallel.layout(), recipe.rollout.layout(), recipe.refit.bucket_mib << 20
    return Route.build(arch, table, layout, engine, bucket, placement, recipe.refit.transport in RELAYING)
