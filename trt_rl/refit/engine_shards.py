"""Which part of which Hugging Face tensor each engine rank holds, and the rules that FP8 adds to that.

The other half of `names`: trainer ranks hold pieces of Megatron parameters, engine ranks hold these boxes. Pure
functions on sizes; no torch. TensorRT-LLM and vLLM cut the same way: attention by heads, MLPs by columns of the
intermediate size, vocabulary by rows; KV heads are repeated where there are fewer of them than ranks.
"""

from __future__ import annotations

import re

from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout, EngineShard, divisors
from trt_rl.refit.names import Box

_EXPERT = re.compile(r".*\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_VOCAB_UNIT = 64  # vLLM's VocabParallelEmbedding pads the vocabulary to a multiple of this before it cuts


def wanted(name: str, shape: tuple[int, ...], arch: Arch, layout: EngineLayout, at: EngineShard) -> Box | None:
    """The box of HF tensor `name` that the engine rank at `at` holds; None if it holds nothing of it."""
    whole = tuple((0, n) for n in shape)
    if layout.whole:
        return whole
    if match := _EXPERT.fullmatch(name):
        each = arch.experts // layout.ep
        if int(match[1]) // each != at.ep:
            return None
        return _cut(whole, 1 if match[2] == "down" else 0, layout.moe_tp, at.moe_tp)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = -(-arch.vocab // _VOCAB_UNIT) * _VOCAB_UNIT // layout.tp
        start, stop = at.tp * rows, min((at.tp + 1) * rows, arch.vocab)
        return ((start, stop), whole[1]) if start < stop else None
    matrix = name.rsplit(".", 2)[-2]
    if matrix in ("k_proj", "v_proj") and layout.tp > arch.kv_heads:
        head, d = at.tp * arch.kv_heads // layout.tp, arch.head_dim
        return ((head * d, (head + 1) * d), whole[1])
    if matrix in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return _cut(whole, 0, layout.tp, at.tp)
    if matrix in ("o_proj", "down_proj"):
        return _cut(whole, 1, layout.tp, at.tp)
    return whole


def _cut(whole: Box, dim: int, parts: int, part: int) -> Box:
    each = whole[dim][1] // parts
    return tuple((part * each, (part + 1) * each) if d == dim else side for d, side in enumerate(whole))


def violations(arch: Arch, layout: EngineLayout, formats: dict[str, str], block: int, fused: bool) -> list[str]:
    """Every reason why an engine of `layout` cannot hold `arch` in `formats`, with the values that would work.

    Args:
        formats: HF tensor name -> format.
        block: rows and columns of an FP8 block.
        fused: the engine fuses q/k/v and gate/up, which cuts on blocks even without tensor parallelism.
    """
    found = layout.violations()
    if found:
        return found
    tp = layout.tp
    for size, what in ((arch.heads, "attention heads"), *(((arch.ffn, "MLP columns"),) if len(arch.moe_layers) < arch.layers else ())):
        if size % tp:
            found.append(f"rollout.parallel.tp = {tp} does not divide the model's {size} {what}; works: {_list(divisors(size))}")
    if arch.kv_heads % tp and tp % arch.kv_heads:
        works = [d for d in divisors(arch.heads) if arch.kv_heads % d == 0 or d % arch.kv_heads == 0]
        found.append(
            f"rollout.parallel.tp = {tp} neither divides nor is a multiple of the model's {arch.kv_heads} KV heads; works: {_list(works)}"
        )
    if -(-arch.vocab // _VOCAB_UNIT) * _VOCAB_UNIT % tp:
        found.append(f"rollout.parallel.tp = {tp} does not divide the vocabulary padded to {_VOCAB_UNIT}; use a power of two")
    if arch.experts and arch.experts % layout.ep:
        found.append(
            f"rollout.parallel.ep = {layout.ep} does not divide the model's {arch.experts} experts; works: {_list(divisors(arch.experts))}"
        )
    if layout.ep > 1 and not arch.experts:
        found.append(f"rollout.parallel.ep = {layout.ep}: a dense model has no experts; set it to 1")
    if arch.experts and arch.moe_ffn % layout.moe_tp:
        found.append(
            f"rollout.parallel: experts are cut tp/ep = {layout.moe_tp} ways, which does not divide moe_intermediate_size = "
            f"{arch.moe_ffn}; raise ep to {tp}"
        )
    if found or "fp8_block" not in formats.values():
        return found
    return _block_violations(arch, layout, formats, block, fused)


def _block_violations(arch: Arch, layout: EngineLayout, formats: dict[str, str], block: int, fused: bool) -> list[str]:
    found, tp, d = [], layout.tp, arch.head_dim
    must = fused or tp > 1

    def need(suffix: str, what: str, size: int, whole: int, fix: str) -> None:
        if must and size % block and any(f == "fp8_block" for n, f in formats.items() if n.endswith(suffix)):
            found.append(f"{what} = {whole} is {size} on each engine rank, which is no multiple of the FP8 block of {block}; {fix}")

    def tps(whole: int, limit: int) -> str:
        works = [p for p in divisors(whole) if whole // p % block == 0 and limit % p == 0]
        return f"use rollout.parallel.tp of {_list(works)}" if works else "exclude these layers in refit.exclude, or use format bf16"

    need("q_proj.weight", "num_attention_heads * head_dim", arch.heads * d // tp, arch.heads * d, tps(arch.heads * d, arch.heads))
    need(
        "k_proj.weight",
        "num_key_value_heads * head_dim",
        max(arch.kv_heads // tp, 1) * d,
        arch.kv_heads * d,
        tps(arch.kv_heads * d, arch.kv_heads),
    )
    if len(arch.moe_layers) < arch.layers:
        need(".mlp.down_proj.weight", "intermediate_size", arch.ffn // tp, arch.ffn, tps(arch.ffn, arch.ffn))
    if arch.experts:
        size = arch.moe_ffn // layout.moe_tp
        works = [p for p in divisors(arch.moe_ffn) if arch.moe_ffn // p % block == 0]
        heads = [p for p in works if arch.heads % p == 0]
        fix = f"use moe_ep (rollout.parallel.ep = {tp}), or TP{'/'.join(map(str, works))}" if works else "exclude *.mlp.experts.*"
        if heads != works:
            fix += f" (of which the {arch.heads} attention heads allow {'/'.join(map(str, heads))})"
        need(".experts.0.down_proj.weight", "moe_intermediate_size", size, arch.moe_ffn, fix)
    need("down_proj.weight", "hidden_size", arch.hidden, arch.hidden, "use format bf16 or fp8_per_tensor")
    return found


def _list(values) -> str:
    return ", ".join(map(str, values))
