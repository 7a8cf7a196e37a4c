"""Which part of which Hugging Face tensor each Megatron parameter holds.

Pure functions on names, sizes and layouts; no torch, no megatron. One table serves loading a checkpoint,
saving one, and routing a refit. Covers Qwen3 dense and MoE, Transformer Engine and local layer names
(fused or separate norms), grouped (`linear_fc1.weight7`) and sequential (`local_experts.7`) experts, tied
embeddings and padded vocabularies.

Megatron's layouts, read from megatron/core/transformer/attention.py and mlp.py:
  * `linear_qkv` interleaves per KV group: the group's queries, its key, its value.
  * `linear_fc1` of a gated MLP is `[gate; up]` on every tensor-parallel rank.
  * Vocabulary rows are padded to a multiple of 128 per rank; the padding belongs to no HF tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import Coordinates, Layout

Box = tuple[tuple[int, int], ...]  # (start, stop) in every dimension


def slices(box: Box) -> tuple[slice, ...]:
    """`box` as an index: `tensor[slices(box)]`."""
    return tuple(slice(start, stop) for start, stop in box)


@dataclass(frozen=True)
class Piece:
    """`local[local_box]` of a Megatron parameter is `hf_name[hf_box]` of the checkpoint."""

    hf_name: str
    hf_box: Box
    local_box: Box


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_EXPERT_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")

# Parameters that every tensor-parallel rank holds whole: Megatron suffix -> HF suffix.
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def hf_pieces(name: str, arch: Arch, layout: Layout, at: Coordinates) -> list[Piece]:
    """The pieces of Megatron parameter `name` on the rank at `at`, in the order of their local rows.

    Raises:
        RefitError: the name is not part of a Qwen3 model in Megatron-core.
    """
    if name == "embedding.word_embeddings.weight":
        return _vocabulary("model.embed_tokens.weight", arch, layout, at)
    if name == "output_layer.weight":
        return _vocabulary("model.embed_tokens.weight" if arch.tied else "lm_head.weight", arch, layout, at)
    if name == "decoder.final_layernorm.weight":
        return [_whole("model.norm.weight", (arch.hidden,))]
    if match := _LAYER.fullmatch(name):
        layer = layout.layers(at.pp, arch.layers)[int(match[1])]
        if pieces := _layer_pieces(f"model.layers.{layer}.", match[2], arch, layout, at):
            return pieces
    raise RefitError(f"Megatron parameter {name!r} has no Hugging Face counterpart in {arch.model_type}")


def parameters(arch: Arch, layout: Layout, at: Coordinates) -> dict[str, tuple[int, ...]]:
    """Names and local shapes of the Megatron parameters on the rank at `at`, as Transformer Engine's layers name them.

    A model with local layers has the same values under other names; `hf_pieces` takes either.
    """
    h, tp = arch.hidden, layout.tp
    vocab = (arch.padded_vocab(tp) // tp, h)
    found = {"embedding.word_embeddings.weight": vocab} if at.pp == 0 else {}
    for i, layer in enumerate(layout.layers(at.pp, arch.layers)):
        p = f"decoder.layers.{i}."
        width = arch.heads // tp * arch.head_dim
        found[p + "self_attention.linear_proj.weight"] = (h, width)
        found[p + "self_attention.linear_qkv.layer_norm_weight"] = (h,)
        found[p + "self_attention.linear_qkv.weight"] = (width + 2 * (arch.kv_heads // tp) * arch.head_dim, h)
        found[p + "self_attention.q_layernorm.weight"] = (arch.head_dim,)
        found[p + "self_attention.k_layernorm.weight"] = (arch.head_dim,)
        if layer in arch.moe_layers:
            found[p + "pre_mlp_layernorm.weight"] = (h,)
            found[p + "mlp.router.weight"] = (arch.experts, h)
            ffn, count = arch.moe_ffn // layout.etp, arch.experts // layout.ep
            found |= {f"{p}mlp.experts.linear_fc1.weight{e}": (2 * ffn, h) for e in range(count)}
            found |= {f"{p}mlp.experts.linear_fc2.weight{e}": (h, ffn) for e in range(count)}
        else:
            found[p + "mlp.linear_fc1.layer_norm_weight"] = (h,)
            found[p + "mlp.linear_fc1.weight"] = (2 * arch.ffn // tp, h)
            found[p + "mlp.linear_fc2.weight"] = (h, arch.ffn // tp)
    if at.pp == layout.pp - 1:
        found["decoder.final_layernorm.weight"] = (h,)
        if not arch.tied:
            found["output_layer.weight"] = vocab
    return found


def owns(name: str, at: Coordinates, arch: Arch) -> bool:
    """Whether this rank, of all that hold the same values, is the one that saves or sends them.

    One rank owns every value: the first replica of a shard, and tensor-parallel rank 0 of what is not cut.
    """
    if ".experts." in name:
        return at.edp == 0
    if at.dp or at.cp:
        return False
    if name == "output_layer.weight" and arch.tied:
        return False  # the copy of the embedding that Megatron keeps on the last pipeline stage
    replicated = name.endswith("final_layernorm.weight") or any(name.endswith("." + suffix) for suffix in _WHOLE)
    return at.tp == 0 or not replicated


def _layer_pieces(prefix: str, suffix: str, arch: Arch, layout: Layout, at: Coordinates) -> list[Piece]:
    if suffix in _WHOLE:
        hf = prefix + _WHOLE[suffix]
        if suffix == "mlp.router.weight":
            return [_whole(hf, (arch.experts, arch.hidden))]
        return [_whole(hf, (arch.head_dim if "_norm.weight" in hf else arch.hidden,))]
    if suffix == "self_attention.linear_qkv.weight":
        return _qkv(prefix + "self_attn.", arch, layout, at)
    if suffix == "self_attention.linear_proj.weight":
        return _columns(prefix + "self_attn.o_proj.weight", arch.hidden, arch.heads * arch.head_dim, layout.tp, at.tp)
    if suffix == "mlp.linear_fc1.weight":
        return _gate_up(prefix + "mlp.", arch.ffn, arch.hidden, layout.tp, at.tp)
    if suffix == "mlp.linear_fc2.weight":
        return _columns(prefix + "mlp.down_proj.weight", arch.hidden, arch.ffn, layout.tp, at.tp)
    if match := _EXPERT_SEQUENTIAL.fullmatch(suffix):
        expert, matrix = int(match[1]), match[2]
    elif match := _EXPERT_GROUPED.fullmatch(suffix):
        expert, matrix = int(match[2]), match[1]
    else:
        return []
    hf = f"{prefix}mlp.experts.{at.ep * (arch.experts // layout.ep) + expert}."
    if matrix == "linear_fc1":
        return _gate_up(hf, arch.moe_ffn, arch.hidden, layout.etp, at.etp)
    return _columns(hf + "down_proj.weight", arch.hidden, arch.moe_ffn, layout.etp, at.etp)


def _whole(hf: str, shape: tuple[int, ...]) -> Piece:
    box = tuple((0, n) for n in shape)
    return Piece(hf, box, box)


def _vocabulary(hf: str, arch: Arch, layout: Layout, at: Coordinates) -> list[Piece]:
    rows = arch.padded_vocab(layout.tp) // layout.tp
    start, stop = at.tp * rows, min((at.tp + 1) * rows, arch.vocab)
    if start >= stop:
        return []  # this rank holds padding only
    return [Piece(hf, ((start, stop), (0, arch.hidden)), ((0, stop - start), (0, arch.hidden)))]


def _qkv(prefix: str, arch: Arch, layout: Layout, at: Coordinates) -> list[Piece]:
    groups, d = arch.kv_heads // layout.tp, arch.head_dim
    queries = arch.heads // arch.kv_heads * d
    columns, pieces, row = (0, arch.hidden), [], 0
    for group in range(at.tp * groups, (at.tp + 1) * groups):
        for matrix, rows in (("q_proj", queries), ("k_proj", d), ("v_proj", d)):
            hf_rows = (group * rows, (group + 1) * rows)
            pieces.append(Piece(f"{prefix}{matrix}.weight", (hf_rows, columns), ((row, row + rows), columns)))
            row += rows
    return pieces


def _gate_up(prefix: str, ffn: int, hidden: int, parts: int, part: int) -> list[Piece]:
    rows, columns = ffn // parts, (0, hidden)
    hf_rows = (part * rows, (part + 1) * rows)
    return [
        Piece(f"{prefix}gate_proj.weight", (hf_rows, columns), ((0, rows), columns)),
        Piece(f"{prefix}up_proj.weight", (hf_rows, columns), ((rows, 2 * rows), columns)),
    ]


def _columns(hf: str, rows: int, columns: int, parts: int, part: int) -> list[Piece]:
    each = columns // parts
    return [Piece(hf, ((0, rows), (part * each, (part + 1) * each)), ((0, rows), (0, each)))]
