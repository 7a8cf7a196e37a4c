"""The same small refits through gloo, through files, and with only the changes sent; and the digests all of them rely on."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.reference import engine_tensors, reference, same_bits
from tests.support.refits import ONE_ENGINE, ONE_RANK, Group
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.digest import _CHUNK, digest, grain_digests
from trt_rl.refit.route import Placement
from trt_rl.refit.stream import Refit
from trt_rl.refit.transports import open_link
from trt_rl.refit.transports.delta import GRAIN
from trt_rl.refit.transports.link import Link

LINKS = {"gloo": dict(transport="gloo"), "disk": dict(transport="disk"), "delta": dict(transport="gloo", delta=True)}
REPLICAS = EngineLayout(replicas=2)


@pytest.fixture
def make(tmp_path):
    """A joined group; all of them leave when the test ends."""
    groups = []

    def new(folder, layout=ONE_RANK, engine=ONE_ENGINE, link="gloo", **options) -> Group:
        group = Group(folder, layout, engine, root=str(tmp_path / "refit"), **LINKS[link], **options)
        groups.append(group)
        return group.__enter__()

    yield new
    for group in groups:
        group.__exit__()


@pytest.fixture(autouse=True)
def dirty_buffers(monkeypatch):
    """Memory is never clean: nothing may rely on what a buffer held before."""
    clean = Link.buffers

    def dirty(self, nbytes):
        return [buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8)) for buffer in clean(self, nbytes)]

    monkeypatch.setattr(Link, "buffers", dirty)


def scale_all(group: Group, factor: float) -> None:
    for weights in group.weights:
        for tensor in weights.values():
            tensor.mul_(factor)


def assert_holds(group: Group, expected: dict[str, torch.Tensor]) -> None:
    for rank in range(group.agreement.engine.world):
        held, wanted = group.held(rank), engine_tensors(expected, group.arch, group.agreement.engine, rank)
        assert held.keys() == wanted.keys()
        assert not (wrong := [name for name in wanted if not same_bits(held[name], wanted[name])]), wrong


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("format", ["bf16", "fp8_block", "fp8_per_tensor"])
@pytest.mark.parametrize(("kind", "layout"), [("dense", Layout(pp=2)), ("moe", Layout(ep=2, dp=2))], ids=["dense-PP2", "moe-EP2"])
@pytest.mark.parametrize("link", LINKS)
def test_successive_versions_arrive_whole(make, models, link, kind, layout, format, nodes):
    placement = Placement((0, 0), (0, nodes - 1))
    group = make(models(kind), layout, REPLICAS, link, format=format, bucket_bytes=10_000, placement=placement)
    for version, factor in ((1, 1.0), (2, 0.5), (3, 0.5)):
        scale_all(group, factor)
        sent, arrived = group.refit(version, full=version == 1)
        assert_holds(group, reference(models(kind), group.table, scale={1: 1.0, 2: 0.5, 3: 0.25}[version]))
        counts = [sum(len(b.slices) for b in group.trainers[0].route.received_by(rank)) for rank in range(2)]
        assert [report.verified for report in arrived] == counts and min(counts) > 0
        assert sum(report.buckets for report in sent) == len(group.trainers[0].route.buckets)


# --- what is verified -------------------------------------------------------------------------------------------


def test_sampling_takes_every_bucket_in_turn():
    for bucket in range(40):
        looked_at = [version for version in range(32) if Refit(version, "sample", full=False).verifies(bucket)]
        assert len(looked_at) == 2 and looked_at[1] - looked_at[0] == 16
    assert all(Refit(5, "sample", full=True).verifies(bucket) for bucket in range(40))
    assert all(Refit(5, "full", full=False).verifies(bucket) for bucket in range(40))
    assert not any(Refit(5, "off", full=full).verifies(bucket) for bucket in range(40) for full in (True, False))


@pytest.mark.parametrize("link", LINKS)
def test_only_what_is_to_be_verified_is_compared(make, models, link):
    group = make(models("dense"), Layout(pp=2), link=link, bucket_bytes=10_000)
    slices = [len(b.slices) for b in group.trainers[0].route.buckets]
    assert len(slices) > 20
    expected = reference(models("dense"), group.table)
    for version, verify, full, buckets in (
        (1, "off", True, []),
        (2, "sample", True, range(len(slices))),
        (3, "sample", False, range(13, len(slices), 16)),
        (4, "full", False, range(len(slices))),
        (5, "off", False, []),
    ):
        for place in group.landings[0].places.values():
            if link != "delta" or full:  # changes need something to be changes of
                place.view.zero_()
        _, (report,) = group.refit(version, verify, full)
        assert report.verified == sum(slices[i] for i in buckets)
        assert_holds(group, expected)


# --- only what changed ------------------------------------------------------------------------------------------


def small_share(group: Group) -> float:
    """Of a refit in which nothing changed: a byte for each grain, and the last one or two grains of each bucket."""
    return sum(-(-b.nbytes // GRAIN) + 1 + 2 * GRAIN for b in group.trainers[0].route.buckets)


@pytest.mark.parametrize("engine", [EngineLayout(), REPLICAS], ids=["one", "relayed"])
def test_what_did_not_change_is_not_sent(make, models, engine):
    group = make(models("dense"), engine=engine, link="delta", bucket_bytes=50_000)
    (first,), _ = group.refit(1)
    whole = sum(b.nbytes for b in group.trainers[0].route.buckets)
    assert whole <= first.bytes <= 1.1 * whole and first.saved_bytes == 0
    (second,), arrived = group.refit(2, full=False)
    assert 0 < second.bytes <= small_share(group) < 0.2 * whole
    assert second.bytes + second.saved_bytes == whole
    assert all(report.verified for report in arrived)
    assert_holds(group, reference(models("dense"), group.table))


@pytest.mark.parametrize("name", ["decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"])
def test_one_changed_parameter_costs_little_more_than_itself(make, models, name):
    group = make(models("dense"), engine=REPLICAS, link="delta", bucket_bytes=50_000)
    group.refit(1)
    changed = group.weights[0][name].mul_(2)
    hf_name = {"linear_fc2": "model.layers.1.mlp.down_proj", "final_layernorm": "model.norm"}[name.split(".")[-2]]
    (report,), _ = group.refit(2, full=False)
    assert report.bytes <= small_share(group) + changed.numel() + 4 * GRAIN
    once, twice = (reference(models("dense"), group.table, scale) for scale in (1.0, 2.0))
    assert_holds(group, {n: (twice if n.startswith(hf_name + ".") else once)[n] for n in once})


def test_a_full_refit_repairs_an_engine_that_lost_what_it_had(make, models):
    group = make(models("dense"), engine=REPLICAS, link="delta", bucket_bytes=50_000)
    group.refit(1)
    for place in group.landings[1].places.values():
        place.view.zero_()
    group.prepare()
    with pytest.raises(RefitError, match="does not hold what trainer rank 0 sent"):
        raise next(r for r in group.move(Refit(2, full=False)) if isinstance(r, Exception))
    (report,), _ = group.refit(3, full=True)
    assert report.bytes >= sum(b.nbytes for b in group.trainers[0].route.buckets) and report.saved_bytes == 0
    assert_holds(group, reference(models("dense"), group.table))


def test_many_slices_in_one_bucket_bring_their_digests(make, models):
    """More digests than fit the grain that holds the header: they travel although they are those of the refit before."""
    group = make(models("moe"), link="delta", bucket_bytes=50_000_000)
    route = group.trainers[0].route
    assert len(route.buckets) == 1 and 8 * len(route.buckets[0].slices) > GRAIN
    group.refit(1)
    _, (report,) = group.refit(2, full=False)
    assert report.verified == len(route.buckets[0].slices)


def test_changes_need_a_link_that_talks(models, tmp_path):
    group = Group(models("dense"), transport="disk", delta=True, root=str(tmp_path))
    with pytest.raises(RefitError, match=r"refit\.delta = true works with refit\.transport gloo or nccl, not disk"):
        group.trainers[0].join()


# --- files ------------------------------------------------------------------------------------------------------


def test_files_tell_what_they_hold_and_two_versions_are_kept(make, models, tmp_path):
    group = make(models("dense"), Layout(pp=2), link="disk")
    for version in range(4):
        group.refit(version)
    root = tmp_path / "refit"
    assert sorted(p.name for p in root.iterdir()) == ["v00000002", "v00000003"]
    folder, found = root / "v00000003", {}
    for rank in range(2):
        manifest = json.loads((folder / f"rank{rank:05d}.json").read_text())
        assert (manifest["version"], manifest["trainer_rank"]) == (3, rank)
        for file, digests in manifest["files"].items():
            with safe_open(folder / file, "pt") as content:
                assert set(content.keys()) == set(digests)
                for key in digests:
                    assert digest(content.get_tensor(key).flatten().view(torch.uint8)) == digests[key]
                    found[key] = content.get_tensor(key)
    expected = reference(models("dense"), group.table)
    norm = found["model.norm.weight[0:64]"]
    assert same_bits(norm, expected["model.norm.weight"])
    assert {key.split("[")[0] for key in found} == set(expected)
    assert not list(folder.glob("*.tmp*"))


def test_files_of_an_earlier_run_are_never_taken_for_new_ones(make, models):
    """A run that is resumed makes versions again that its folder has already."""
    folder = models("dense")
    make(folder, link="disk").refit(1)
    second = make(folder, link="disk", scale=0.5)
    second.prepare()
    trainer, engine = second.trainers[0], second.engines[0]
    engine.agreement.meeting.__dict__["timeout_s"] = 0.3  # the engine is faster than the trainer
    with pytest.raises(RefitError, match="did not appear within"):
        engine.receive(Refit(1))
    assert trainer.send(Refit(1)).bytes
    second.engines[0].join()
    second.engines[0].prepare()
    engine.receive(Refit(1))
    assert_holds(second, reference(folder, second.table, scale=0.5))


def test_unknown_links_are_named(make, models):
    group = Group(models("dense"))
    with pytest.raises(RefitError, match=r"refit\.transport = 'carrier' is unknown; transports: gloo, nccl, ipc, disk"):
        open_link("carrier", group.agreement.meeting, 0, group.trainers[0].route)
    with pytest.raises(RefitError, match=r"needs a folder that every process can reach; set run\.folder"):
        open_link("disk", group.agreement.meeting, 0, group.trainers[0].route)


# --- digests ----------------------------------------------------------------------------------------------------


def plain_digest(data: bytes) -> int:
    """The definition in the module's text, one word at a time in Python's own integers."""
    mask, total = 2**64 - 1, 0
    for i, start in enumerate(range(0, len(data), 8)):
        x = (int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little") + (i + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        total = (total + (x ^ x >> 31)) & mask
    return total - 2**64 if total >= 2**63 else total


def raw(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 2**32), st.integers(0, 7))
def test_digest_is_what_its_definition_says_at_any_address(size, seed, shift):
    data = raw(size + shift, seed)[shift:]
    assert digest(data) == plain_digest(data.numpy().tobytes())
    assert -(2**63) <= digest(data) < 2**63


@pytest.mark.parametrize("size", [8 * _CHUNK - 1, 8 * _CHUNK, 8 * _CHUNK + 1, 24 * _CHUNK + 13])
def test_digest_across_chunks(size):
    assert digest(raw(size, 1)) == plain_digest(raw(size, 1).numpy().tobytes())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2000), st.data())
def test_any_flipped_bit_changes_the_digest(size, data):
    values = raw(size, size)
    before = digest(values)
    values[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(values) != before


def test_every_single_flip_and_every_swap_of_words_is_seen():
    values, seen = raw(256, 3), set()
    for byte, bit in itertools.product(range(256), range(8)):
        values[byte] ^= 1 << bit
        seen.add(digest(values))
        values[byte] ^= 1 << bit
    assert len(seen | {digest(values)}) == 256 * 8 + 1
    words = values.view(torch.int64)
    for i, j in itertools.combinations(range(32), 2):
        swapped = words.clone()
        swapped[[i, j]] = swapped[[j, i]]
        assert digest(swapped.view(torch.uint8)) != digest(values)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([8, 16, 24, 1024]), st.integers(1, 40), st.integers(0, 2**32))
def test_grain_digests_are_the_digests_of_the_grains(grain, count, seed):
    data = raw(grain * count, seed)
    assert grain_digests(data, grain).tolist() == [digest(part.clone()) for part in data.view(count, grain)]


def test_grain_digests_across_chunks():
    data = raw(1024 * (_CHUNK // 128 + 3), 5)
    assert grain_digests(data, 1024).tolist() == [digest(part.clone()) for part in data.view(-1, 1024)]
