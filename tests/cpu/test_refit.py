"""What the engine holds after a refit equals a single-process quantization of the checkpoint, bit for bit."""

from __future__ import annotations

import dataclasses
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.jobs import quantize
from trt_rl.arch import Arch
from trt_rl.errors import ModelError, RefitError
from trt_rl.layout import Layout
from trt_rl.refit.bucket import Bucket, BucketWriter
from trt_rl.refit.hf_files import HFFolder, write_folder
from trt_rl.refit.load import Loader
from trt_rl.refit.names import hf_pieces, owns
from trt_rl.refit.precision import PrecisionTable, scale_name

LAYOUTS = {
    "dense": [Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, pp=2)],
    "tied": [Layout(tp=2), Layout(pp=2)],
    "moe": [Layout(ep=2, dp=2), Layout(tp=2, etp=2), Layout(tp=2, ep=2), Layout(pp=2, ep=2, dp=2), Layout(tp=2, ep=2, dp=2)],
}
CASES = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


def reference(folder, table: PrecisionTable) -> dict[str, torch.Tensor]:
    """Quantize whole tensors of the checkpoint, written down here without the code under test."""
    files, expected = HFFolder(folder, Arch.load(folder)), {}
    for name, shape in table.shapes.items():
        weight = files.read(name, tuple((0, n) for n in shape)).bfloat16()
        if table.formats[name] == "bf16":
            expected[name] = weight
            continue
        wide, scales = weight.float(), torch.empty(-(-shape[0] // 128), -(-shape[1] // 128))
        result = torch.empty(shape, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
                scale = wide[at].abs().max() / 448
                scales[i, j] = scale if scale > 0 else 1.0
                result[at] = (wide[at] / scales[i, j]).to(torch.float8_e4m3fn)
        expected[name], expected[scale_name(name)] = result, scales
    return expected


def empty_targets(table: PrecisionTable) -> dict[str, torch.Tensor]:
    return {n: torch.zeros(shape, dtype=getattr(torch, dtype)) for n, (dtype, shape) in table.wire_tensors().items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[f"{k}-{x}" for k, x in CASES])
def test_any_layout_delivers_the_same_bits(ranks, models, kind, layout, format):
    folder = models(kind)
    table = PrecisionTable.build(Arch.load(folder), format)
    targets = empty_targets(table)
    loader = Loader(targets, version=0)
    for buckets in ranks.run(layout.world, "tests.support.jobs:refit_buckets", str(folder), layout, format):
        for bucket in buckets:
            loader.load(Bucket.from_wire(bucket.manifest(), bucket.payload))
    loader.finish()
    for name, expected in reference(folder, table).items():
        assert same_bits(targets[name], expected), name


def test_blocks_shared_between_ranks_and_many_buckets_do_not_wait_for_each_other(ranks, models):
    """The engine hears one rank after the other while those ranks exchange block maxima between themselves."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = models("dense")
    results = ranks.run(2, "tests.support.jobs:send_through_gloo", str(folder), Layout(tp=2, etp=2), 2000, store.port)
    for name, expected in reference(folder, PrecisionTable.build(Arch.load(folder), "fp8_block")).items():
        assert same_bits(results[0][name], expected), name


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_nan_is_refused_by_name(ranks, models, format):
    job = "tests.support.jobs:refit_buckets"
    with pytest.raises(AssertionError, match=r"model\.layers\.0\.self_attn\.o_proj\.weight: the trainer's weight holds NaN"):
        ranks.run(2, job, str(models("dense")), Layout(tp=2), format, "decoder.layers.0.self_attention.linear_proj.weight")


# --- quantization of odd blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0.0, 1e-42, 1e-38, 3e38, -1.0])
def test_extreme_blocks_give_finite_values(fill):
    weight = torch.full((130, 140), fill)
    (values,), scales = quantize((130, 140), [(((0, 130), (0, 140)), weight)])
    back = values.float() * scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :140]
    assert torch.isfinite(values.float()).all() and torch.isfinite(scales).all() and (scales > 0).all()
    assert torch.allclose(back, weight, rtol=0.07, atol=6e-36)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_pieces_on_one_rank_equal_the_whole(rows, columns, data):
    torch.manual_seed(rows * 1000 + columns)
    weight = torch.randn(rows, columns)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
    pieces = [(((a, b), (0, columns)), weight[a:b]) for a, b in pairwise(cuts)]
    parts, scales = quantize((rows, columns), pieces)
    (whole,), expected = quantize((rows, columns), [(((0, rows), (0, columns)), weight)])
    assert same_bits(torch.cat(parts), whole) and same_bits(scales, expected)


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


def test_an_unknown_parameter_is_refused():
    with pytest.raises(RefitError, match=r"decoder\.layers\.0\.mlp\.surprise.* has no Hugging Face counterpart"):
        hf_pieces("decoder.layers.0.mlp.surprise", Arch.from_dict(TINY), Layout(), Layout().at(0))


# --- the transaction --------------------------------------------------------------------------------------------


def bucket_of(*slices) -> Bucket:
    writer = BucketWriter(1 << 20)
    assert not list(writer.add(*slices))
    return next(writer.finish())


def loader_for(**targets) -> Loader:
    return Loader(targets, version=3)


def test_faults_are_named():
    ones = torch.ones(4, 4)
    box = ((0, 4), (0, 4))
    with pytest.raises(RefitError, match="stranger: the engine has no such tensor"):
        loader_for(w=ones.clone()).load(bucket_of(("stranger", box, ones)))
    with pytest.raises(RefitError, match=r"w: the engine holds torch\.float32, the trainer sent torch\.bfloat16"):
        loader_for(w=ones.clone()).load(bucket_of(("w", box, ones.bfloat16())))
    with pytest.raises(RefitError, match="is outside the engine's"):
        loader_for(w=torch.ones(2, 4)).load(bucket_of(("w", box, ones)))
    loader = loader_for(w=torch.zeros(4, 4))
    loader.load(bucket_of(("w", ((0, 2), (0, 4)), ones[:2])))
    with pytest.raises(RefitError, match="w: 8 of 16 values arrived for version 3"):
        loader.finish()
    with pytest.raises(RefitError, match="was sent twice"):
        loader.load(bucket_of(("w", ((1, 3), (0, 4)), ones[:2])))
    bucket = bucket_of(("w", box, ones))
    bucket.payload[5] ^= 1
    with pytest.raises(RefitError, match="the bytes that arrived are not those that were sent"):
        loader_for(w=torch.zeros(4, 4)).load(bucket)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 400))
def test_buckets_carry_everything_in_bounded_size(sizes, capacity):
    writer, sent = BucketWriter(capacity), {}
    slices = [(f"t{i}", ((0, n),), torch.randint(0, 255, (n,), dtype=torch.uint8)) for i, n in enumerate(sizes)]
    buckets = [b for s in slices for b in writer.add(s)] + list(writer.finish())
    for bucket in buckets:
        assert bucket.payload.numel() <= capacity or len(bucket.entries) == 1
        sent |= {entry.name: tensor for entry, tensor in Bucket.from_wire(bucket.manifest(), bucket.payload).tensors()}
    assert all(torch.equal(sent[name], tensor) for name, _, tensor in slices)


def test_precision_table_keeps_and_excludes():
    arch = Arch.from_dict(TINY_MOE)
    table = PrecisionTable.build(arch, "fp8_block", ("model.layers.0.*",))
    fp8 = {n for n, f in table.formats.items() if f == "fp8_block"}
    assert "model.layers.1.self_attn.q_proj.weight" in fp8 and "model.layers.2.mlp.experts.3.down_proj.weight" in fp8
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "layers.0.")
    assert not [n for n in fp8 if any(k in n for k in kept)]
    assert table.digest != PrecisionTable.build(arch, "fp8_block").digest
    with pytest.raises(RefitError, match=r"'model\.layer\.0' matches no tensor"):
        PrecisionTable.build(arch, "fp8_block", ("model.layer.0",))
    with pytest.raises(RefitError, match="splits the experts of layer 1"):
        PrecisionTable.build(arch, "fp8_block", ("model.layers.1.mlp.experts.2.*",))


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
