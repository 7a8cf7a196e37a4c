"""GPU memory by component, from sizes alone. Weights, gradients, optimizer and KV cache are arithmetic; activations follow
what Transformer Engine's layers keep for the backward pass (Korthikanti et al., arXiv:2205.05198, for this architecture);
what CUDA, NCCL and the engines' runtimes take is set by hand from the records in benchmarks/h200/engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

from trt_rl.arch import Arch
from trt_rl.config import Recipe, TrainerSettings
from trt_rl.errors import RecipeError
from trt_rl.layout import Layout
from trt_rl.plan.checks import recipe_violations
from trt_rl.plan.counts import RankCount, engine_bytes, of_stages
from trt_rl.plan.seating import Seating
from trt_rl.refit.precision import PrecisionTable

GIB = 2**30
CUDA_GIB = 0.9
"""CUDA context, cuBLAS workspaces and what the allocator cannot use, of a trainer rank."""
NCCL_GIB = 0.25
"""Buffers of a process group that spans GPUs."""
ENGINE_GIB = 2.5
"""CUDA context, workspaces, graphs and activations of an engine rank."""
ASLEEP_GIB = 3.0
"""What remains of an engine that sleeps, CUDA context included: vLLM 0.24 on H200, benchmarks/h200/engine."""
OFFLOADABLE = get_args(get_args(TrainerSettings.model_fields["offload"].annotation)[0])
"""Components that `trainer.offload` may name."""


@dataclass(frozen=True)
class TrainerMemory:
    """GiB of one rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    refit_buffers: float
    overhead: float

    def offloaded(self, what: Collection[str]) -> float:
        """Of it, gone while an engine generates: the optimizer's part to host memory, gradients are not kept."""
        return sum(getattr(self, part) for part in set(what))

    def resident(self, offload: Collection[str] = ()) -> float:
        """What stays while an engine generates on the same GPU."""
        whole = self.weights + self.gradients + self.optimizer + self.refit_buffers + self.overhead
        return whole - self.offloaded(offload)

    def at_start(self, precision: str, offload: Collection[str] = ()) -> float:
        """What is there when an engine starts on the same GPU: of the optimizer the FP32 copy of BF16 weights only, Adam's
        moments come with the first update."""
        moments = 0.0 if "optimizer" in offload else self.optimizer * (2 / 3 if precision == "bf16" else 1)
        return self.resident(offload) - moments

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class EngineMemory:
    """GiB of one rank, and what its KV cache holds."""

    weights: float
    kv_cache: float
    refit_buffers: float
    overhead: float
    kv_bytes_per_token: int
    sequences: int
    """Of the longest prompt and response, in the KV cache of one replica."""

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + self.refit_buffers + self.overhead


def longest_sample(recipe: Recipe) -> int:
    return recipe.data.max_prompt_tokens + recipe.rollout.sampling.max_tokens


def trainer_stages(recipe: Recipe, arch: Arch, slot_bytes: int) -> list[TrainerMemory]:
    """Of a rank of each pipeline stage. `slot_bytes`: the largest bucket that a rank sends."""
    layout = recipe.trainer.parallel.layout()
    return [_trainer_rank(recipe, arch, layout, stage, count, slot_bytes) for stage, count in enumerate(of_stages(arch, layout))]


def _trainer_rank(recipe: Recipe, arch: Arch, layout: Layout, stage: int, count: RankCount, slot_bytes: int) -> TrainerMemory:
    trainer = recipe.trainer
    width, master = (2, 12) if trainer.precision == "bf16" else (4, 8)
    tokens = max(trainer.microbatch_tokens, longest_sample(recipe)) / layout.cp
    samples = recipe.rollout.prompts_per_step * recipe.rollout.group_size / trainer.mini_batches / layout.dp
    in_flight = min(layout.pp - stage, max(1, int(samples)))
    layers = layout.layers(stage, arch.layers)
    moe = sum(layer in arch.moe_layers for layer in layers)
    kept, working = _layer_bytes(arch, layout, trainer.megatron, width, moe=False)
    kept_moe, working_moe = _layer_bytes(arch, layout, trainer.megatron, width, moe=True) if moe else (0.0, 0.0)
    activations = tokens * (
        in_flight * ((len(layers) - moe) * kept + moe * kept_moe) + max(working if moe < len(layers) else 0, working_moe)
    )
    logits = 0.0
    if stage == layout.pp - 1:
        columns = arch.padded_vocab(layout.tp) // layout.tp
        logits = columns * (2 * width * tokens + 3 * 4 * min(trainer.logprob_chunk, tokens))  # logits, their gradient, FP32 chunks
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.dp, layout.ep))
    return TrainerMemory(
        weights=count.total * width / GIB,
        gradients=count.total * 4 / GIB,
        optimizer=master * (count.dense / (layout.dp * layout.cp) + count.expert / layout.edp) / GIB,
        activations=activations / GIB,
        logits=logits / GIB,
        refit_buffers=2 * slot_bytes / GIB,
        overhead=CUDA_GIB + NCCL_GIB * groups,
    )


def _layer_bytes(arch: Arch, layout: Layout, megatron: dict[str, Any], width: int, moe: bool) -> tuple[float, float]:
    """Bytes a token that one layer keeps until its backward pass, and bytes a token of one layer at work on top of that."""
    tp, h = layout.tp, arch.hidden / layout.tp  # with sequence parallelism, what is not cut by heads is cut by tokens
    q, kv = arch.heads * arch.head_dim / tp, arch.kv_heads * arch.head_dim / tp
    modules = set(megatron.get("recompute_modules") or ()) if megatron.get("recompute_granularity") == "selective" else set()
    norm = 0.0 if "layernorm" in modules else h
    attention = h + norm + (q + 2 * kv) + 2 * (q + kv) + q  # input, normed, qkv, q and k normed and rotated, output
    gathered = arch.hidden if tp > 1 else 0.0  # a linear layer's input, gathered from the ranks again in the backward pass
    if moe:
        copies, ffn = arch.experts_per_token / tp * layout.etp, arch.moe_ffn / layout.etp
        act = 0.0 if "moe_act" in modules else ffn
        block = 0.0 if "moe" in modules else copies * (arch.hidden + 2 * ffn + act) + 3 * 4 / width * arch.experts / tp
        gathered += 2 * copies * arch.hidden  # dispatched and combined tokens
    else:
        block = 0.0 if "mlp" in modules else 3 * arch.ffn / tp
    kept = width * (attention + h + norm + block)
    working = width * (gathered + (2 * arch.ffn / tp if not moe else 3 * copies * ffn))  # gradients of the widest part
    if megatron.get("recompute_granularity") == "full":
        every = megatron.get("recompute_num_layers") or 1
        if megatron.get("recompute_method") == "block":  # the first layers of a stage only
            share = min(1.0, every * layout.pp / arch.layers)
            return share * width * h + (1 - share) * kept, working + kept
        return width * h / every, working + every * kept
    if modules:  # what is not kept is there again while its layer is at work
        whole, _ = _layer_bytes(arch, layout, {}, width, moe)
        working += whole - kept
    return kept, working


def engine_rank(recipe: Recipe, arch: Arch, table: PrecisionTable, memory_gib: float, beside: float, slot_bytes: int) -> EngineMemory:
    """Of a rank of an engine that starts on a GPU of which a trainer holds `beside` GiB."""
    rollout, engine = recipe.rollout, recipe.rollout.layout()
    weights = engine_bytes(arch, table, engine) / GIB
    options, buffers = getattr(rollout, rollout.engine), 2 * slot_bytes / GIB
    per_token = 2 * arch.layers * max(arch.kv_heads // engine.tp, 1) * arch.head_dim * (1 if _fp8_cache(options) else 2)
    if rollout.engine == "vllm":
        cache = number(recipe, "gpu_memory_utilization", 0.9) * memory_gib - weights - ENGINE_GIB
        cache = min(cache, number(recipe, "kv_cache_memory_bytes", cache * GIB) / GIB)
    elif rollout.engine == "sglang":  # a share of what is free when it starts
        cache = number(recipe, "mem_fraction_static", 0.85) * (memory_gib - beside) - weights
        cache = min(cache, number(recipe, "max_total_tokens", cache * GIB / per_token) * per_token / GIB)
    elif rollout.engine == "trtllm":
        free = memory_gib - beside - weights - ENGINE_GIB - buffers
        cache = number(recipe, "kv_cache_config.free_gpu_memory_fraction", 0.9) * free
        cache = min(cache, number(recipe, "kv_cache_config.max_tokens", cache * GIB / per_token) * per_token / GIB)
    else:  # the embedded engine's cache grows with its batch
        cache = number(recipe, "max_batch", 64) * longest_sample(recipe) * per_token / GIB
    sequences = int(max(cache, 0) * GIB // (per_token * longest_sample(recipe)))
    return EngineMemory(weights, max(cache, 0.0), buffers, ENGINE_GIB, per_token, sequences)


def number(recipe: Recipe, key: str, default: float) -> float:
    """An option of the recipe's engine; null is its default.

    Raises:
        RecipeError: it is no number.
    """
    engine, value = recipe.rollout.engine, getattr(recipe.rollout, recipe.rollout.engine)
    for part in key.split("."):
        value = (value or {}).get(part)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"rollout.{engine}.{key} = {value!r} is not a number; leave it out for the engine's own")
    return value


def _fp8_cache(options: dict[str, Any]) -> bool:
    asked = options.get("kv_cache_dtype") or (options.get("kv_cache_config") or {}).get("dtype") or ""
    return "fp8" in str(asked)


def violations(recipe: Recipe, arch: Arch, memory_gib: float, worst: TrainerMemory, engine: EngineMemory, slot_bytes: int) -> Iterator[str]:
    """What does not fit a GPU of `memory_gib`, with the nearest settings that would."""
    colocated, rollout = recipe.rollout.colocated, recipe.rollout
    asleep_gib = ASLEEP_GIB if colocated else 0.0
    beside = worst.at_start(recipe.trainer.precision, recipe.trainer.offload) if colocated else 0.0
    if worst.total + asleep_gib > memory_gib:
        parts = ", ".join(f"{f.name.replace('_', ' ')} {getattr(worst, f.name):.1f}" for f in fields(worst))
        asleep = f", an engine asleep {ASLEEP_GIB}" if colocated else ""
        works = _fitting(recipe, arch, memory_gib - asleep_gib, slot_bytes)
        yield (
            f"a trainer rank needs about {worst.total + asleep_gib:.1f} GiB of a GPU's {memory_gib} ({parts}{asleep}); "
            + (f"works: {'; or '.join(works)}" if works else "use more GPUs: larger tp, pp, ep or dp")
        )
    room = memory_gib - (worst.resident(recipe.trainer.offload) if colocated else 0.0)
    least = engine.weights + engine.overhead + engine.refit_buffers
    where = " beside the trainer" if colocated else ""
    freed = worst.offloaded(set(OFFLOADABLE) - set(recipe.trainer.offload)) if colocated else 0.0
    offload = f"set trainer.offload = [{', '.join(OFFLOADABLE)}] ({freed:.1f} GiB), or " if freed else ""
    if least > room:
        yield (
            f"rollout.parallel.tp = {rollout.parallel.tp}: an engine rank needs {least:.1f} GiB without any KV cache, and {max(room, 0):.1f} are "
            f"free{where}; {offload if least <= room + freed else ''}raise rollout.parallel.tp"
            + (", make the trainer smaller, or set rollout.colocated = false" if colocated else "")
        )
    elif engine.sequences < 1:
        yield (
            f"the KV cache of an engine rank gets {engine.kv_cache:.1f} GiB, less than one sequence of {longest_sample(recipe)} tokens "
            f"({engine.kv_bytes_per_token * longest_sample(recipe) / GIB:.1f}); raise {_CACHE_KEY[rollout.engine]} or rollout.parallel.tp"
        )
    elif engine.total > room:
        if rollout.engine != "vllm" or engine.total > room + freed:  # the others take a share of what is free, so more of it then
            offload = ""
        yield f"an engine rank takes {engine.total:.1f} GiB where {room:.1f} are free{where}; {offload}use {_smaller(recipe, engine, memory_gib, beside, room)}"
    elif rollout.engine == "vllm":
        one = number(recipe, "max_model_len", arch.max_positions)
        if one * engine.kv_bytes_per_token > engine.kv_cache * GIB:
            yield (
                f"rollout.vllm.max_model_len = {one:.0f} (the model's, if left out) needs {one * engine.kv_bytes_per_token / GIB:.1f} GiB of KV cache, "
                f"which has {engine.kv_cache:.1f}, and vLLM would not start; use {longest_sample(recipe)}"
            )


_CACHE_KEY = {
    "vllm": "rollout.vllm.gpu_memory_utilization",
    "sglang": "rollout.sglang.mem_fraction_static",
    "trtllm": "rollout.trtllm.kv_cache_config.free_gpu_memory_fraction",
    "hf": "rollout.hf.max_batch",
}


def _smaller(recipe: Recipe, engine: EngineMemory, memory_gib: float, beside: float, room: float) -> str:
    """The option that makes the engine fit `room`, and a value that does."""
    key, spare = _CACHE_KEY[recipe.rollout.engine], room - engine.refit_buffers
    if recipe.rollout.engine == "hf":
        return f"a smaller {key}"
    if recipe.rollout.engine == "vllm":
        share = spare / memory_gib
    elif recipe.rollout.engine == "sglang":
        share = (spare - engine.overhead) / (memory_gib - beside)
    else:
        asked = number(recipe, "kv_cache_config.free_gpu_memory_fraction", 0.9)
        share = asked * (engine.kv_cache - (engine.total - room)) / engine.kv_cache
    return f"{key} of at most {math.floor(100 * share) / 100:.2f}"


def _fitting(recipe: Recipe, arch: Arch, memory_gib: float, slot_bytes: int) -> list[str]:
    """Single changes after which a trainer rank fits, at most three."""
    trainer, parallel, works = recipe.trainer, recipe.trainer.parallel, []
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    longest = longest_sample(recipe)
    changes: list[tuple[str, dict[str, Any]]] = []
    if trainer.megatron.get("recompute_granularity") != "full":
        changes.append((f"trainer.megatron = {recompute}", {"megatron": trainer.megatron | recompute}))
    tokens = trainer.microbatch_tokens // 2
    while tokens >= max(longest, 512):
        changes.append((f"trainer.microbatch_tokens = {tokens}", {"microbatch_tokens": tokens}))
        tokens //= 2
    for key in ("dp", "tp", "pp", "ep"):
        for factor in (2, 4, 8, 16):
            size = getattr(parallel, key) * factor
            if key == "ep" and size > parallel.dp * parallel.tp * parallel.cp:
                break
            changes.append((f"trainer.parallel.{key} = {size}", {"parallel": parallel.model_copy(update={key: size})}))
    done: set[str] = set()
    known = set(recipe_violations(recipe))
    for text, update in changes:
        key = text.split(" = ")[0]
        changed = recipe.model_copy(update={"trainer": trainer.model_copy(update=update)})
        if recipe.rollout.colocated:  # engines keep to the trainer's GPUs
            replicas, rest = divmod(changed.trainer.parallel.layout().world, recipe.rollout.parallel.tp)
            if rest:
                continue
            if replicas != recipe.rollout.replicas:
                text += f" with rollout.replicas = {replicas}"
            changed = changed.model_copy(update={"rollout": recipe.rollout.model_copy(update={"replicas": replicas})})
        layout = changed.trainer.parallel.layout()
        seating = Seating.of(layout, changed.rollout.layout(), recipe.cluster.gpus_per_node, recipe.rollout.colocated)
        too_large = recipe.cluster.nodes is not None and seating.nodes > recipe.cluster.nodes
        if key in done or too_large or set(recipe_violations(changed)) - known or arch.layout_violations(layout):
            continue
        if max(stage.total for stage in trainer_stages(changed, arch, slot_bytes)) <= memory_gib:
            works.append(text)
            done.add(key)
    return works[:3]
