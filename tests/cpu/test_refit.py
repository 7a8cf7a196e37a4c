"""Arithmetic, names, precision tables and files of the refit, without processes."""

from __future__ import annotations

import dataclasses
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reference import by_blocks, same_bits
from trt_rl.arch import Arch
from trt_rl.errors import ModelError, RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.engine_shards import violations
from trt_rl.refit.hf_files import HFFolder, write_folder
from trt_rl.refit.names import hf_pieces, owns, parameters
from trt_rl.refit.precision import BLOCK, PrecisionPolicy, PrecisionTable
from trt_rl.refit.quantize import grid_maxima, quantize_blocks, quantize_per_tensor, scales_of, touched

# --- quantization of odd blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0.0, 1e-42, 1e-38, 3e38, -1.0])
def test_extreme_blocks_give_finite_values(fill):
    weight = torch.full((130, 140), fill)
    values, scales = quantize_blocks(((0, 130), (0, 140)), weight)
    back = values.float() * scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :140]
    assert torch.isfinite(values.float()).all() and torch.isfinite(scales).all() and (scales > 0).all()
    assert torch.allclose(back, weight, rtol=0.07, atol=6e-36)
    whole = quantize_per_tensor(weight, scale := scales_of(weight.abs().amax().reshape(1)))
    assert scale.shape == (1,) and torch.allclose(whole.float() * scale, weight, rtol=0.07, atol=6e-36)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_pieces_with_their_blocks_maxima_equal_the_whole(rows, columns, data):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in (rows, columns)]
    boxes = [(r, c) for r in pairwise(cuts[0]) for c in pairwise(cuts[1])]
    parts = [(box, weight[slice(*box[0]), slice(*box[1])]) for box in boxes]
    maxima = grid_maxima((rows, columns), parts)
    values, scales = by_blocks(weight)
    for box, part in parts:
        found, its_scales = quantize_blocks(box, part, maxima[touched(box)])
        assert same_bits(found, values[slice(*box[0]), slice(*box[1])]) and same_bits(its_scales, scales[touched(box)])


# --- names ------------------------------------------------------------------------------------------------------

TINY = dict(
    model_type="qwen3", hidden_size=8, intermediate_size=24, num_hidden_layers=4, num_attention_heads=12,
    num_key_value_heads=6, head_dim=4, vocab_size=300, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
TINY_MOE = TINY | dict(model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)


def parameter_names(arch: Arch, layout: Layout, pp_rank: int, style: str) -> list[str]:
    """Names as Megatron gives them, for Transformer Engine (`te`) or local layers, written from its sources."""
    names = ["embedding.word_embeddings.weight"] if pp_rank == 0 else []
    for i in range(arch.layers // layout.pp):
        at = f"decoder.layers.{i}."
        moe = bool(arch.experts)
        names += [at + "self_attention.linear_qkv.weight", at + "self_attention.linear_proj.weight"]
        names += [at + "self_attention.q_layernorm.weight", at + "self_attention.k_layernorm.weight"]
        names += [at + ("self_attention.linear_qkv.layer_norm_weight" if style == "te" else "input_layernorm.weight")]
        names += [at + ("mlp.linear_fc1.layer_norm_weight" if style == "te" and not moe else "pre_mlp_layernorm.weight")]
        if not moe:
            names += [at + "mlp.linear_fc1.weight", at + "mlp.linear_fc2.weight"]
            continue
        names.append(at + "mlp.router.weight")
        for e in range(arch.experts // layout.ep):
            for fc in ("linear_fc1", "linear_fc2"):
                names.append(f"{at}mlp.experts.{fc}.weight{e}" if style == "te" else f"{at}mlp.experts.local_experts.{e}.{fc}.weight")
    if pp_rank == layout.pp - 1:
        names += ["decoder.final_layernorm.weight", "output_layer.weight"]
    return names


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["te", "local"]),
    st.sampled_from([TINY, TINY_MOE]),
    st.booleans(),
)
def test_owned_pieces_tile_every_tensor_exactly_once(tp, pp, ep, style, config, tied):
    arch = Arch.from_dict(config | {"tie_word_embeddings": tied})
    layout = Layout(tp=tp, pp=pp, ep=ep if arch.experts else 1, etp=1 if arch.experts else tp, dp=ep)
    assert not layout.violations()
    hits = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in arch.hf_shapes().items()}
    for rank in range(layout.world):
        at = layout.at(rank)
        for name in parameter_names(arch, layout, at.pp, style):
            for piece in hf_pieces(name, arch, layout, at):
                assert [b - a for a, b in piece.hf_box] == [b - a for a, b in piece.local_box]
                if owns(name, at, arch):
                    hits[piece.hf_name][tuple(slice(*b) for b in piece.hf_box)] += 1
    assert all((count == 1).all() for count in hits.values()), [n for n, c in hits.items() if not (c == 1).all()]


@pytest.mark.parametrize("config", [TINY, TINY_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("layout", [Layout(tp=2, etp=2), Layout(pp=2), Layout(tp=2, pp=2, ep=2, dp=2), Layout(ep=3, dp=3)], ids=str)
def test_parameters_are_those_of_transformer_engines_layers_and_consist_of_pieces(config, layout):
    arch = Arch.from_dict(config)
    layout = layout if arch.experts else dataclasses.replace(layout, ep=1)
    for at in map(layout.at, range(layout.world)):
        found = parameters(arch, layout, at)
        assert set(found) == set(parameter_names(arch, layout, at.pp, "te"))
        for name, shape in found.items():
            hits = torch.zeros(shape, dtype=torch.int32)
            for piece in hf_pieces(name, arch, layout, at):
                hits[tuple(slice(*side) for side in piece.local_box)] += 1
            padding = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            assert hits.max() == 1 and (padding or hits.min() == 1), name


def test_an_unknown_parameter_is_refused():
    with pytest.raises(RefitError, match=r"decoder\.layers\.0\.mlp\.surprise.* has no Hugging Face counterpart"):
        hf_pieces("decoder.layers.0.mlp.surprise", Arch.from_dict(TINY), Layout(), Layout().at(0))


# --- which tensors are FP8 --------------------------------------------------------------------------------------


def fp8(config: dict, **policy) -> set[str]:
    return {n for n, f in PrecisionTable.build(Arch.from_dict(config), PrecisionPolicy(**policy)).formats.items() if f != "bf16"}


@pytest.mark.parametrize("format", ["fp8_block", "fp8_per_tensor"])
def test_linear_weights_are_fp8_and_the_rest_stays(format):
    linear = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for config in (TINY, TINY_MOE):
        shapes = Arch.from_dict(config).hf_shapes()
        assert fp8(config, format=format) == {n for n in shapes if n.split(".")[-2] in linear} != set()
    assert fp8(TINY_MOE, format="bf16") == set()


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (dict(bf16_first_layers=1), lambda n: ".layers.0." in n),
        (dict(bf16_last_layers=2), lambda n: ".layers.2." in n or ".layers.3." in n),
        (dict(bf16_first_layers=1, bf16_last_layers=1), lambda n: ".layers.0." in n or ".layers.3." in n),
        (dict(bf16_attention=True), lambda n: ".self_attn." in n),
        (dict(bf16_first_layers=9), lambda n: True),
        (dict(exclude=("model.layers.0.*",)), lambda n: ".layers.0." in n),
        (dict(exclude=("*.o_proj",)), lambda n: "o_proj" in n),  # a module, as in ModelOpt
        (dict(exclude=("*.o_proj.weight",)), lambda n: "o_proj" in n),  # a tensor
        (dict(exclude=("model.layers.[12].mlp*",)), lambda n: ".layers.1.mlp" in n or ".layers.2.mlp" in n),
        (dict(exclude=("*.mlp.experts.*", "*.layers.3.self_attn.*")), lambda n: ".experts." in n or ".layers.3.self_attn" in n),
    ],
    ids=str,
)
def test_what_the_policy_keeps_in_bf16(policy, kept):
    everything = fp8(TINY_MOE)
    stays = {name for name in everything if kept(name)}
    assert stays and fp8(TINY_MOE, **policy) == everything - stays
    tables = [PrecisionTable.build(Arch.from_dict(TINY_MOE), PrecisionPolicy(**p)) for p in (policy, policy, {})]
    assert tables[0].digest == tables[1].digest != tables[2].digest


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (dict(exclude=("model.layer.0",)), r"'model\.layer\.0' matches no tensor; names look like 'model\.layers\.0\.self_attn"),
        (
            dict(exclude=("*.layers.1.mlp.experts.2.*",)),
            r"splits the experts of layer 1; .*exclude all \(model\.layers\.1\.mlp\.experts\.\*\)",
        ),
        (dict(exclude=("*.layers.2.self_attn.k_proj",)), r"splits self_attn\.q_proj, self_attn\.k_proj, self_attn\.v_proj of layer 2"),
        (dict(format="fp4"), r"refit\.format is 'fp4'; known formats: bf16, fp8_block, fp8_per_tensor"),
    ],
    ids=str,
)
def test_policies_that_cannot_be_are_named(policy, message):
    with pytest.raises(RefitError, match=message):
        PrecisionTable.build(Arch.from_dict(TINY_MOE), PrecisionPolicy(**policy))


def test_gate_and_up_have_one_format():
    with pytest.raises(RefitError, match=r"splits mlp\.gate_proj, mlp\.up_proj of layer 0; engines fuse them: exclude all or none"):
        PrecisionTable.build(Arch.from_dict(TINY), PrecisionPolicy(exclude=("*.layers.0.mlp.up_proj",)))


def test_wire_names_dtypes_and_shapes_of_scales():
    arch = dataclasses.replace(Arch.from_dict(TINY), hidden=200, ffn=300)
    name, tables = (
        "model.layers.0.mlp.gate_proj",
        {f: PrecisionTable.build(arch, PrecisionPolicy(f)) for f in ("bf16", "fp8_block", "fp8_per_tensor")},
    )
    wires = {f: {n: v for n, v in t.wire_tensors().items() if n.startswith(name)} for f, t in tables.items()}
    assert wires["bf16"] == {f"{name}.weight": ("bfloat16", (300, 200))}
    assert wires["fp8_block"] == {f"{name}.weight": ("float8_e4m3fn", (300, 200)), f"{name}.weight_scale_inv": ("float32", (3, 2))}
    assert wires["fp8_per_tensor"] == {
        f"{name}.weight": ("float8_e4m3fn", (300, 200)),
        f"{name}.weight_scale": ("float32", (1,)),
        f"{name}.input_scale": ("float32", (1,)),
    }


def test_what_the_table_tells_engines():
    arch = Arch.from_dict(TINY_MOE)
    block = PrecisionTable.build(arch, PrecisionPolicy(bf16_first_layers=1, exclude=("*.o_proj",)))
    kept = [f"model.layers.0.self_attn.{m}_proj" for m in "qkvo"] + ["model.layers.0.mlp.gate", "model.layers.0.mlp.experts"]
    for layer in (1, 2, 3):
        kept += [f"model.layers.{layer}.self_attn.o_proj", f"model.layers.{layer}.mlp.gate"]
    kept.append("lm_head")
    assert block.bf16_modules() == kept
    told = block.hf_quant_config()
    assert told["producer"]["name"] == "trt_rl"
    assert told["quantization"] == {"quant_algo": "FP8_PB_WO", "kv_cache_quant_algo": None, "exclude_modules": kept, "group_size": 128}
    assert block.quantization_config() == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "modules_to_not_convert": kept,
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    tensor = PrecisionTable.build(arch, PrecisionPolicy("fp8_per_tensor"))
    assert tensor.hf_quant_config()["quantization"]["quant_algo"] == "FP8" and "group_size" not in tensor.hf_quant_config()["quantization"]
    assert tensor.quantization_config()["activation_scheme"] == "static" and "weight_block_size" not in tensor.quantization_config()
    plain = PrecisionTable.build(arch, PrecisionPolicy("bf16"))
    assert plain.quantization_config() is None and plain.hf_quant_config()["quantization"]["quant_algo"] is None


# --- which engine layouts can hold it ---------------------------------------------------------------------------

QWEN3_30B = dict(
    model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, vocab_size=151936, max_position_embeddings=64, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip
ODD = TINY | dict(hidden_size=2048, num_attention_heads=12, num_key_value_heads=6, head_dim=128, intermediate_size=6144, vocab_size=300)


@pytest.mark.parametrize(
    ("config", "engine", "messages"),
    [
        (QWEN3_30B, EngineLayout(tp=2), []),
        (QWEN3_30B, EngineLayout(tp=4, ep=2), []),
        (QWEN3_30B, EngineLayout(tp=8, ep=8), []),  # more ranks than KV heads: each head twice
        (
            QWEN3_30B,
            EngineLayout(tp=4),
            [
                "moe_intermediate_size = 768 is 192 on each engine rank, which is no multiple of the FP8 block of 128; "
                "use moe_ep (rollout.parallel.ep = 4), or TP1/2/3/6 (of which the 32 attention heads allow 1/2)"
            ],
        ),
        (QWEN3_30B, EngineLayout(tp=4, ep=3), ["rollout.parallel.ep = 3 does not divide rollout.parallel.tp = 4; works: 1, 2, 4"]),
        (QWEN3_30B | dict(num_experts=127), EngineLayout(tp=2, ep=2), ["rollout.parallel.ep = 2 does not divide the model's 127 experts; works: 1, 127"]),
        (
            ODD,
            EngineLayout(tp=5, ep=5),
            [
                "rollout.parallel.tp = 5 does not divide the model's 12 attention heads; works: 1, 2, 3, 4, 6, 12",
                "rollout.parallel.tp = 5 does not divide the model's 6144 MLP columns; works: ",
                "rollout.parallel.tp = 5 neither divides nor is a multiple of the model's 6 KV heads; works: 1, 2, 3, 6, 12",
                "rollout.parallel.ep = 5: a dense model has no experts; set it to 1",
            ],
        ),
        (ODD, EngineLayout(tp=4), ["rollout.parallel.tp = 4 neither divides nor is a multiple of the model's 6 KV heads; works: 1, 2, 3, 6, 12"]),
        (ODD | dict(vocab_size=100), EngineLayout(tp=3), ["rollout.parallel.tp = 3 does not divide the vocabulary padded to 64; use a power of two"]),
        (
            ODD | dict(head_dim=64),
            EngineLayout(tp=2),
            ["num_key_value_heads * head_dim = 384 is 192 on each engine rank, which is no multiple of the FP8 block of 128; use rollout.parallel.tp of 1, 3"],
        ),
        (
            ODD | dict(intermediate_size=192 * 2),
            EngineLayout(tp=2),
            ["intermediate_size = 384 is 192 on each engine rank, which is no multiple of the FP8 block of 128; use rollout.parallel.tp of 1, 3"],
        ),
        (
            ODD | dict(hidden_size=2000),
            EngineLayout(tp=2),
            ["hidden_size = 2000 is 2000 on each engine rank, which is no multiple of the FP8 block of 128; use format bf16 or fp8_per_tensor"],
        ),
    ],
)  # fmt: skip
def test_engine_layouts_that_cannot_hold_a_model_name_those_that_can(config, engine, messages):
    arch = Arch.from_dict(config)
    formats = PrecisionTable.build(arch, PrecisionPolicy()).formats
    found = violations(arch, engine, formats, BLOCK, fused=False)
    assert len(found) == len(messages) and all(f.startswith(m) for f, m in zip(found, messages, strict=True)), found


def test_the_block_rule_concerns_fused_engines_at_any_size_and_only_what_is_fp8_block():
    arch = Arch.from_dict(TINY)
    table = PrecisionTable.build(arch, PrecisionPolicy())
    assert violations(arch, EngineLayout(), table.formats, BLOCK, fused=False) == []
    assert len(violations(arch, EngineLayout(), table.formats, BLOCK, fused=True)) == 4
    for policy in (PrecisionPolicy("fp8_per_tensor"), PrecisionPolicy("bf16"), PrecisionPolicy(exclude=("model.layers.*",))):
        assert violations(arch, EngineLayout(tp=2), PrecisionTable.build(arch, policy).formats, BLOCK, fused=True) == []
    attention = PrecisionTable.build(arch, PrecisionPolicy(bf16_attention=True)).formats
    assert [v.split(" = ")[0] for v in violations(arch, EngineLayout(tp=2), attention, BLOCK, fused=True)] == [
        "intermediate_size",
        "hidden_size",
    ]


# --- checkpoint files -------------------------------------------------------------------------------------------


def test_sharded_checkpoints_and_damage(tmp_path, models):
    source = models("dense")
    arch = Arch.load(source)
    files = HFFolder(source, arch)
    whole = {name: files.read(name, tuple((0, n) for n in shape)) for name, shape in arch.hf_shapes().items()}
    write_folder(tmp_path, iter(whole.items()), shard_bytes=100_000)
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    again = HFFolder(tmp_path, arch)
    assert all(torch.equal(again.read(n, tuple((0, s) for s in t.shape)), t) for n, t in whole.items())

    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-10])
    with pytest.raises(ModelError, match=f"{shards[1].name} is truncated: {len(content) - 10} bytes"):
        HFFolder(tmp_path, arch)
    shards[1].write_bytes(content[:4])
    with pytest.raises(ModelError, match="is truncated"):
        HFFolder(tmp_path, arch)
    shards[1].write_bytes(struct.pack("<Q", 5) + b"hello")
    with pytest.raises(ModelError, match="is not a safetensors file"):
        HFFolder(tmp_path, arch)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"{shards[1].name} is missing"):
        HFFolder(tmp_path, arch)


def test_wrong_shape_and_missing_tensor_are_named(tmp_path, models):
    source = models("dense")
    arch = Arch.load(source)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight has shape \[130, 64\], config\.json makes it \[131, 64\]"):
        HFFolder(source, dataclasses.replace(arch, vocab=131))
    with pytest.raises(ModelError, match=r"11 tensors are missing, the first is model\.layers\.4\.input_layernorm\.weight"):
        HFFolder(source, dataclasses.replace(arch, layers=5))
    with pytest.raises(ModelError, match="holds neither"):
        HFFolder(tmp_path, arch)
