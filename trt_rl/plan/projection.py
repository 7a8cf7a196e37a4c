"""A projection of a step's time: rooflines of the GPU with shares of them that are given or assumed. Nothing here is measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from trt_rl.arch import Arch
from trt_rl.config import Recipe
from trt_rl.plan.counts import Counts
from trt_rl.plan.gpus import Gpu
from trt_rl.plan.memory import EngineMemory, number

_HOP_US = {True: 12.0, False: 40.0}  # one all-reduce of a decoding step, inside a node or between nodes; assumed
_HOST_MS, _HOST_US = 2.0, 30.0  # of a decoding step and of each of its sequences: vLLM 0.24, benchmarks/h200/engine
_MOST_AT_ONCE = {
    "vllm": ("max_num_seqs", 256),
    "trtllm": ("max_batch_size", 2048),
    "sglang": ("max_running_requests", 2048),
    "hf": ("max_batch", 64),
}


@dataclass(frozen=True)
class Rates:
    """What the projection assumes where nothing was measured; every field can be given on the command line."""

    prompt_share: float = 0.5
    """Mean prompt over data.max_prompt_tokens."""
    response_share: float = 0.5
    """Mean response over rollout.sampling.max_tokens."""
    oversampling: float = 0.0
    """Samples generated for each one trained on; 0: 1.5 with dynamic sampling, 1 without."""
    mfu: float = 0.0
    """Share of the BF16 peak that training reaches; 0: 0.40 dense, 0.25 MoE."""
    decode: float = 0.5
    """Share of memory bandwidth and of the peak that decoding reaches."""


def project(recipe: Recipe, arch: Arch, gpu: Gpu, rates: Rates, engine: EngineMemory, refit_s: float, inside: bool) -> dict[str, Any]:
    """
    Args:
        inside: whether the ranks of a replica share a node.
    """
    rollout, trainer, counts = recipe.rollout, recipe.trainer, Counts.of(arch)
    oversampling = rates.oversampling or (1.5 if recipe.algo.dynamic_sampling.enabled else 1.0)
    mfu = rates.mfu or (0.25 if arch.experts else 0.40)
    prompt, response = rates.prompt_share * recipe.data.max_prompt_tokens, rates.response_share * rollout.sampling.max_tokens
    samples = rollout.prompts_per_step * rollout.group_size
    tokens, length = samples * (prompt + response), prompt + response

    attention = 4 * arch.layers * arch.heads * arch.head_dim * length / 2  # FLOPs a token, forward, causal
    passes = 1 + 3 + (trainer.megatron.get("recompute_granularity") == "full")  # old log-probs; forward and backward
    forward = 2 * counts.active + attention
    peak = trainer.parallel.layout().world * gpu.bf16_tflops * 1e12
    train_s = tokens * forward * passes / (peak * mfu)
    bubble = (trainer.parallel.pp - 1) / max(1.0, samples / trainer.mini_batches / trainer.parallel.dp * length / trainer.microbatch_tokens)
    train_s *= 1 + bubble

    rollout_s, rate, batch = _generation(recipe, arch, counts, gpu, rates, engine, samples * oversampling, prompt, response, inside)
    total = rollout_s + train_s + refit_s
    gpus = trainer.parallel.layout().world, rollout.layout().world
    work = train_s * gpus[0], rollout_s * gpus[1]
    both = sum(gpus)
    return {
        "labelled": "projection from assumed rates, not measured",
        "assumed": asdict(rates) | {"oversampling": oversampling, "mfu": mfu},
        "tokens_per_step": round(tokens),
        "generated_tokens_per_step": round(samples * oversampling * response),
        "rollout_s": round(rollout_s, 2),
        "train_s": round(train_s, 2),
        "refit_s": round(refit_s, 3),
        "step_s": round(total, 2),
        "trained_tokens_per_s_and_gpu": round(tokens / total / (gpus[0] if rollout.colocated else both), 1),
        "decode_tokens_per_s_of_replica": round(rate),
        "decode_batch_of_replica": batch,
        "bottleneck": "rollout" if rollout_s > train_s else "trainer",
        "balance": "trainer and engine take turns on the same GPUs" if rollout.colocated else _balance(*work, both),
    }


def _balance(train: float, rollout: float, gpus: int) -> str:
    """Where `train` and `rollout` GPU seconds would sit best, as far as either side goes faster with more GPUs."""

    def of(share: float) -> int:
        return max(1, min(gpus - 1, round(share * gpus)))

    shortest = of(math.sqrt(rollout) / (math.sqrt(rollout) + math.sqrt(train)))
    return f"{shortest} of these {gpus} GPUs for rollout make the step shortest; with {of(rollout / (rollout + train))} both sides take equally long"


def most_at_once(recipe: Recipe) -> float:
    """Sequences that an engine decodes together, at most."""
    key, most = _MOST_AT_ONCE[recipe.rollout.engine]
    return number(recipe, key, most)


def _generation(recipe, arch, counts, gpu, rates, engine, samples, prompt, response, inside) -> tuple[float, float, int]:
    """Seconds, tokens/s and sequences at once of one replica."""
    rollout, tp = recipe.rollout, recipe.rollout.parallel.tp
    mine = samples / rollout.replicas
    room = engine.kv_cache * 2**30 / engine.kv_bytes_per_token / (prompt + response)
    batch = max(1, round(min(mine, room, most_at_once(recipe))))
    fp8 = recipe.refit.format != "bf16" and gpu.fp8_tflops
    flops = tp * (gpu.fp8_tflops if fp8 else gpu.bf16_tflops) * 1e12
    touched = 1.0
    if arch.experts:  # of the experts, those that some sequence of the batch is sent to
        experts = counts.experts / counts.total
        touched = 1 - experts + experts * (1 - (1 - arch.experts_per_token / arch.experts) ** batch)
    read = engine.weights * 2**30 * touched + batch * (prompt + response / 2) * engine.kv_bytes_per_token
    step = max(read / (gpu.memory_tb_s * 1e12), 2 * counts.active * batch / flops) / rates.decode
    step += (tp > 1) * 2 * arch.layers * _HOP_US[inside] * 1e-6 + _HOST_MS * 1e-3 + batch * _HOST_US * 1e-6
    prefill = 2 * counts.active * mine / rollout.group_size * prompt / (flops * 0.4)  # one prefill a group: the prefix is cached
    longest = rollout.sampling.max_tokens * step  # some response usually reaches the limit
    seconds = max(mine * response / batch * step, longest) + prefill
    return seconds, batch / step, batch
