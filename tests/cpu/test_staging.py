"""Staging joins slices to whole tensors and gives them to a loader; `LiveCheck` looks at what the loader made of them. No processes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.landing import Place
from trt_rl.refit.names import slices
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.route import HEADER_BYTES, BucketPlan, Slice
from trt_rl.refit.slot import Slot, raw_bytes, write_digests
from trt_rl.refit.staging import LiveCheck, Staging, fused_group

CONFIG = dict(
    model_type="qwen3", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=128, vocab_size=96, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
MOE = CONFIG | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
WHOLE = EngineLayout(2, 1, whole=True)


def tables(config: dict, format: str = "fp8_block") -> tuple[Arch, PrecisionTable]:
    arch = Arch.from_dict(config)
    return arch, PrecisionTable.build(arch, PrecisionPolicy(format))


def tensors_of(table: PrecisionTable, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random values for everything that travels."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(getattr(torch, t)) for name, (t, shape) in table.wire_tensors().items()}


def cut(tensors: dict[str, torch.Tensor], cuts: dict[str, list[int]]) -> list[tuple[str, tuple]]:
    """(name, box) of pieces: every tensor cut by rows."""
    found = []
    for name, tensor in tensors.items():
        edges = sorted({0, len(tensor), *(c for c in cuts.get(name, []) if c < len(tensor))})
        found += [(name, ((a, b), *((0, n) for n in tensor.shape[1:]))) for a, b in itertools.pairwise(edges)]
    return found


def bucket(number: int, pieces: list[tuple[str, tuple]], tensors: dict[str, torch.Tensor]) -> Slot:
    """A bucket as a sender fills it."""
    parts, offset = [], 0
    for name, box in pieces:
        nbytes = tensors[name][slices(box)].nbytes
        parts.append(Slice(name, str(tensors[name].dtype).removeprefix("torch."), box, offset, nbytes))
        offset += -(-nbytes // 16) * 16
    plan = BucketPlan(number, 0, ((0,),), tuple(parts))
    slot = Slot(plan, torch.zeros(plan.nbytes + HEADER_BYTES, dtype=torch.uint8))
    for part in parts:
        slot.raw(part).copy_(raw_bytes(tensors[part.name][slices(part.box)]))
    write_digests(slot)
    slot.write_header(1, 7)
    return slot


@dataclass
class Loader:
    """Keeps what it is given, as an engine's loader copies it."""

    calls: list[list[str]] = field(default_factory=list)
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    refuses: str = ""

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.calls.append(list(tensors))
        if self.refuses in tensors:
            raise RefitError(f"the loader does not like {self.refuses}")
        assert not self.held.keys() & tensors.keys(), "a tensor was handed over twice"
        self.held |= {name: tensor.clone() for name, tensor in tensors.items()}


def staging(config: dict = CONFIG, hand_over_bytes: int = 1 << 30, format: str = "fp8_block") -> tuple[Staging, Loader, dict]:
    arch, table = tables(config, format)
    loader = Loader()
    made = Staging(arch, table, WHOLE, 0, torch.device("cpu"), loader, hand_over_bytes, "engine rank 5")
    made.reset()
    return made, loader, tensors_of(table)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(raw_bytes(a[n]), raw_bytes(b[n])) and a[n].shape == b[n].shape for n in a)


# --- joining ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.integers(0, 300_000), st.integers(0, 2**31))
def test_slices_in_any_order_and_buckets_give_the_tensors_once_group_by_group(data, moe, hand_over_bytes, seed):
    target, loader, tensors = staging(MOE if moe else CONFIG, hand_over_bytes)
    cuts = {name: data.draw(st.lists(st.integers(1, max(1, len(t) - 1)), max_size=2)) for name, t in list(tensors.items())[:12]}
    pieces = cut(tensors, cuts)
    random.Random(seed).shuffle(pieces)
    size = data.draw(st.integers(1, 12))
    buckets = [bucket(i, pieces[at : at + size], tensors) for i, at in enumerate(range(0, len(pieces), size))]
    for slot in buckets:
        target.load(slot, verify=True)
        slot.buffer.fill_(255)  # the next bucket is received there
    arrivals = target.arrivals()
    assert [a.plan.number for a in arrivals] == list(range(len(buckets)))
    assert sum(a.verified for a in arrivals) == len(pieces) and not any(a.mismatches for a in arrivals)
    assert same(loader.held, tensors) and all(loader.calls), "the loader was called for nothing"
    members: dict[str, int] = {}
    for name in tensors:
        members[fused_group(name)] = members.get(fused_group(name), 0) + 1
    for call in loader.calls:
        for group in {fused_group(name) for name in call}:
            assert sum(fused_group(name) == group for name in call) == members[group], f"{group} was handed over in parts"
    assert target.peak_bytes >= max(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    "together",
    [
        [f"model.layers.1.self_attn.{m}_proj.{leaf}" for m in "qkv" for leaf in ("weight", "weight_scale_inv")],
        [f"model.layers.0.mlp.{m}_proj.{leaf}" for m in ("gate", "up") for leaf in ("weight", "weight_scale_inv")],
        [f"model.layers.0.mlp.experts.3.{m}_proj.{leaf}" for m in ("gate", "up", "down") for leaf in ("weight", "weight_scale_inv")],
        ["model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight_scale_inv"],
        ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"],
    ],
    ids=["qkv", "gate and up", "an expert", "o", "down"],
)
def test_what_engines_fuse_is_one_group(together):
    (group,) = {fused_group(name) for name in together}
    names = {n for config in (CONFIG, MOE) for n in tables(config)[1].wire_tensors()}
    assert set(together) <= names and {n for n in names if fused_group(n) == group} == set(together)


def test_groups_wait_until_they_fill_a_bucket():
    _, _, tensors = staging()
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(fused_group(name), []).append(name)
    sizes = [sum(tensors[n].nbytes for n in names) for names in groups.values()]
    limit = 100_000
    target, loader, _ = staging(hand_over_bytes=limit)
    expected, waiting, filled = [], [], 0
    for (_, names), size in zip(groups.items(), sizes, strict=True):
        target.load(bucket(0, cut({n: tensors[n] for n in names}, {}), tensors), verify=False)
        waiting, filled = waiting + names, filled + size
        if filled >= limit:
            expected, waiting, filled = [*expected, waiting], [], 0
        assert loader.calls == expected
    assert len(expected) > 2 and waiting
    target.arrivals()
    assert loader.calls == [*expected, waiting], "the rest is handed over at the end"
    assert limit <= target.peak_bytes < limit + 2 * max(sizes)


def test_a_refit_forgets_the_one_before():
    target, loader, tensors = staging()
    pieces = cut(tensors, {})
    target.load(bucket(0, pieces[:20], tensors), verify=True)
    target.reset()
    target.load(bucket(0, pieces, tensors), verify=True)
    assert len(target.arrivals()) == 1 and same(loader.held, tensors)


# --- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lacking", ["model.layers.1.self_attn.k_proj.weight_scale_inv", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_an_incomplete_tensor_is_named(lacking):
    target, loader, tensors = staging()
    pieces = [(name, box) for name, box in cut(tensors, {lacking: [1]}) if (name, box[0][0]) != (lacking, 0)]
    missing = tensors[lacking][0].numel()
    target.load(bucket(0, pieces, tensors), verify=True)
    with pytest.raises(RefitError, match=f"{fused_group(lacking)}: {missing} values did not arrive at engine rank 5"):
        target.arrivals()
    assert not loader.calls


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_a_flipped_bit_in_a_bucket_is_found_and_nothing_more_is_loaded(at, bit):
    target, loader, tensors = staging(hand_over_bytes=1)
    pieces = cut(tensors, {})
    early, late = bucket(0, pieces[:10], tensors), bucket(1, pieces[10:], tensors)
    wrong = late.plan.slices[at % len(late.plan.slices)]
    late.raw(wrong)[at % wrong.nbytes] ^= 1 << bit
    target.load(early, verify=True)
    before = len(loader.calls)
    target.load(late, verify=True)
    assert len(loader.calls) == before > 0
    first, second = target.arrivals()
    assert (first.mismatches, second.mismatches) == ([], [wrong])
    assert len(loader.calls) == before


def test_without_verification_a_flipped_bit_passes():
    target, loader, tensors = staging()
    slot = bucket(0, cut(tensors, {}), tensors)
    slot.raw(slot.plan.slices[3])[0] ^= 1
    target.load(slot, verify=False)
    (arrival,) = target.arrivals()
    assert not arrival.mismatches and not arrival.verified and not same(loader.held, tensors)


def test_a_loaders_failure_is_told_at_the_end_and_ends_loading():
    target, loader, tensors = staging(hand_over_bytes=1)
    loader.refuses = "model.layers.0.self_attn.k_proj.weight"
    for number, piece in enumerate(cut(tensors, {})):
        target.load(bucket(number, [piece], tensors), verify=True)  # others may depend on this member: it goes on
    assert loader.refuses in loader.calls[-1], "the loader was called again after it had failed"
    with pytest.raises(RefitError, match=f"the loader does not like {loader.refuses}"):
        target.arrivals()
    assert loader.refuses in loader.calls[-1]
    loader.refuses, loader.held = "", {}
    target.reset()
    target.load(bucket(0, cut(tensors, {}), tensors), verify=True)
    target.arrivals()
    assert same(loader.held, tensors)


def test_a_failure_in_the_last_hand_over_is_told():
    target, loader, tensors = staging()
    loader.refuses = "model.norm.weight"
    target.load(bucket(0, cut(tensors, {}), tensors), verify=True)
    assert not loader.calls
    with pytest.raises(RefitError, match=r"does not like model\.norm\.weight"):
        target.arrivals()


def test_a_delta_is_refused():
    target, _, tensors = staging()
    with pytest.raises(RefitError, match=r"turn refit\.delta off"):
        target.fetch(bucket(0, cut(tensors, {}), tensors))


# --- live tensors -----------------------------------------------------------------------------------------------

ROWS = {
    "model.layers.0.self_attn.q_proj.weight": (128, 256),
    "model.layers.1.mlp.gate_proj.weight": (0, 128),
    "model.norm.weight": (0, 128),
}


def checked(tensors: dict[str, torch.Tensor]) -> tuple[LiveCheck, dict[str, torch.Tensor]]:
    """A rank that holds some rows of some tensors, some of them inside a larger live tensor."""
    live, places = {}, {}
    for name, (start, stop) in ROWS.items():
        whole = tensors[name]
        around = torch.zeros((stop - start + 64, *whole.shape[1:]), dtype=whole.dtype)
        live[name] = around[32 : 32 + stop - start]
        places[name] = Place(((start, stop), *((0, n) for n in whole.shape[1:])), live[name])
    return LiveCheck(places, "engine rank 5"), live


def test_live_tensors_that_hold_what_was_given_are_counted():
    _, _, tensors = staging()
    check, live = checked(tensors)
    for half in (list(tensors)[::2], list(tensors)[1::2]):
        check.given({name: tensors[name] for name in half})
    for name, (start, stop) in ROWS.items():
        live[name].copy_(tensors[name][start:stop])
    assert check.compare() == len(ROWS)
    with pytest.raises(RefitError, match="nothing was loaded into the live tensor of engine rank 5"):
        check.compare()  # nothing was given since


@pytest.mark.parametrize("spoilt", ROWS)
def test_a_live_tensor_that_differs_is_named_with_its_slice_and_rank(spoilt):
    _, _, tensors = staging()
    check, live = checked(tensors)
    check.given(tensors)
    for name, (start, stop) in ROWS.items():
        live[name].copy_(tensors[name][start:stop])
    live[spoilt].view(torch.uint8)[-1, ...].flatten()[-1:].bitwise_xor_(1)
    start, stop = ROWS[spoilt]
    box = rf"{spoilt}\[\[{start}, {stop}\]".replace(".", r"\.")
    with pytest.raises(RefitError, match=rf"{box}.*: the live tensor of engine rank 5 does not hold what was given"):
        check.compare()


def test_a_live_tensor_that_nothing_was_given_for_is_named():
    _, _, tensors = staging()
    check, live = checked(tensors)
    check.given({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    for name, (start, stop) in ROWS.items():
        live[name].copy_(tensors[name][start:stop])
    with pytest.raises(RefitError, match=r"model\.norm\.weight: nothing was loaded into the live tensor of engine rank 5"):
        check.compare()
