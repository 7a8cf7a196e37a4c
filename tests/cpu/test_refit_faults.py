"""Every fault of a refit ends in one error that names it, and in an engine that serves nothing or what it served before."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from tests.support.reference import reference, same_bits
from tests.support.refits import ONE_ENGINE, ONE_RANK, Group
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit import landing
from trt_rl.refit.landing import Place
from trt_rl.refit.route import Placement, Slice
from trt_rl.refit.session import RefitSession
from trt_rl.refit.slot import Slot
from trt_rl.refit.stream import Refit
from trt_rl.refit.transports.gloo import _GlooExchange

TWO = EngineLayout(replicas=2)
SMALL = dict(bucket_bytes=10_000, timeout_s=15.0)  # many buckets; nobody may come to wait for the timeout


@pytest.fixture
def make(models):
    groups = []

    def new(kind: str = "dense", layout=ONE_RANK, engine=ONE_ENGINE, **options) -> Group:
        groups.append(Group(models(kind), layout, engine, **(SMALL | options)))
        return groups[-1].__enter__()

    yield new
    for group in groups:
        group.__exit__()


@pytest.fixture(autouse=True)
def nobody_waits_for_a_timeout():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SMALL["timeout_s"], "somebody waited for a member that was gone"


def only_error(results: list, at: int) -> str:
    """The message of the member at `at`; all others must have succeeded."""
    assert [isinstance(r, BaseException) for r in results] == [i == at for i in range(len(results))], results
    assert isinstance(results[at], RefitError)
    return str(results[at])


def at_bucket(function, number: int, action):
    """`function`, but `action` comes before its call number `number` (from 0)."""
    calls = iter(range(1 << 30))

    def wrapped(*args, **kwargs):
        if next(calls) == number:
            action()
        return function(*args, **kwargs)

    return wrapped


def fail() -> None:
    raise RuntimeError("out of luck")


# --- members that end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [0, 1, 5])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_sender_that_fails_ends_everyone_s_wait_with_its_name(make, nodes, bucket):
    group = make(layout=Layout(pp=2), engine=TWO, placement=Placement((0, 0), (0, nodes - 1)))
    group.prepare()
    group.trainers[1].source.fill = at_bucket(group.trainers[1].source.fill, bucket, fail)
    sent_0, sent_1, *received = group.move(Refit(1))
    assert isinstance(sent_1, RuntimeError) and "out of luck" in str(sent_1)
    assert not isinstance(sent_0, RuntimeError), "the other trainer rank is not to blame"
    assert all(isinstance(error, RefitError) and "stopped sending" in str(error) for error in received)
    assert any(str(error).startswith("trainer rank 1 stopped sending") for error in received)


@pytest.mark.parametrize("bucket", [0, 1, 5])
def test_a_receiver_that_fails_is_lost_and_the_other_is_served(make, bucket):
    group = make(engine=TWO, placement=Placement((0,), (1, 2)))
    group.prepare()
    landings = group.landings[1]
    landings.load = at_bucket(landings.load, bucket, fail)
    sent, received, lost = group.move(Refit(1))
    assert isinstance(lost, RuntimeError)
    assert sent.lost == [2] and received.verified > 0
    expected = reference(group.folder, group.table)
    assert all(same_bits(group.held(0)[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("who", "lost_by"), [(0, "sender"), (1, "head")])
def test_in_a_chain_a_lost_tail_costs_nobody_and_a_lost_head_its_tail(make, who, lost_by):
    group = make(engine=TWO)
    assert {b.chains for b in group.trainers[0].route.buckets} == {((0, 1),)}
    group.prepare()
    landings = group.landings[who]
    landings.load = at_bucket(landings.load, 3, fail)
    sent, head, tail = group.move(Refit(1))
    if lost_by == "head":
        assert sent.lost == [] and head.lost == [2] and head.verified > 0 and isinstance(tail, RuntimeError)
    else:
        assert sent.lost == [1] and isinstance(head, RuntimeError)
        assert isinstance(tail, RefitError) and str(tail).startswith("engine rank 0 stopped sending")


def test_a_member_that_never_comes_is_waited_for_no_longer_than_the_timeout(models):
    group = Group(models("dense"), timeout_s=2.0)
    with pytest.raises(RefitError, match="trainer rank 0 could not join the refit group of 2"):
        group.trainers[0].join()


def test_a_store_that_does_not_answer_is_named(models):
    group = Group(models("dense"), timeout_s=2.0)
    group.trainers[0].agreement = dataclasses.replace(
        group.agreement, meeting=dataclasses.replace(group.agreement.meeting, port=1)
    )  # fmt: skip
    with pytest.raises(RefitError, match=r"the refit's store at 127\.0\.0\.1:1 does not answer"):
        group.trainers[0].join()


# --- bytes that change on their way -----------------------------------------------------------------------------


def part_of(group: Group, name: str, engine: int = 0) -> tuple[int, Slice]:
    """Number and slice of the first bucket that brings some of `name`."""
    return next((b.number, p) for b in group.trainers[0].route.received_by(engine) for p in b.slices if p.name == name)


def on_arrival(monkeypatch, group: Group, number: int, change) -> None:
    """`change(slot)` when bucket `number` has arrived at an engine, before it is loaded or passed on."""
    received = _GlooExchange.received

    def changed(self):
        payload = received(self)
        if self.receive.bucket == number:
            change(Slot(group.trainers[0].route.buckets[number], payload))
        return payload

    monkeypatch.setattr(_GlooExchange, "received", changed)


@pytest.mark.parametrize("matrix", ["self_attn.k_proj.weight", "self_attn.k_proj.weight_scale_inv", "input_layernorm.weight"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_a_byte_flipped_on_the_wire_names_tensor_slice_and_ranks(make, monkeypatch, layout, matrix):
    group = make(layout=layout)
    number, part = part_of(group, f"model.layers.3.{matrix}")
    sender = group.trainers[0].route.buckets[number].sender
    assert sender == layout.world - 1
    group.prepare()

    def flip(slot: Slot) -> None:
        slot.raw(part)[-1] ^= 1

    on_arrival(monkeypatch, group, number, flip)
    message = only_error(group.move(Refit(1)), layout.world)
    assert message.startswith(f"{part.name}{[list(side) for side in part.box]}: the live tensor of engine rank 0 does not hold")
    assert f"what trainer rank {sender} sent ({part.dtype}, {part.nbytes} bytes; 1 slice(s) differ)" in message


def test_a_flipped_digest_is_seen_and_a_flipped_header_is_named(make, monkeypatch):
    group = make()
    number, part = part_of(group, "model.norm.weight")
    group.prepare()
    index = group.trainers[0].route.buckets[number].slices.index(part)
    with monkeypatch.context() as patch:
        on_arrival(patch, group, number, lambda slot: slot.digests[index].add_(1))
        assert only_error(group.move(Refit(1)), 1).startswith("model.norm.weight[[0, 64]]: the live tensor")
    group.prepare()
    on_arrival(monkeypatch, group, number, lambda slot: slot.header[1].add_(1))
    message = only_error(group.move(Refit(2)), 1)
    assert f"bucket {number} from trainer rank 0 arrived at engine rank 0 as version 2, bucket {number + 1}; expected" in message


def test_unverified_bytes_are_not_seen_which_is_what_verification_is_for(make, monkeypatch):
    """Proves that the tests above fail for the reason they name."""
    group = make()
    number, part = part_of(group, "model.norm.weight")
    group.prepare()
    on_arrival(monkeypatch, group, number, lambda slot: slot.raw(part)[0].bitwise_xor_(1))
    (sent, received) = group.move(Refit(1, verify="off"))
    assert sent.bytes and received.verified == 0
    assert not same_bits(group.held()["model.norm.weight"], reference(group.folder, group.table)["model.norm.weight"])


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_memory_that_does_not_hold_what_was_written_names_tensor_slice_and_rank(make, monkeypatch, verify):
    group = make(engine=TWO)
    name = "model.layers.2.mlp.gate_proj.weight"
    bad = group.held(1)[name]
    raw_bytes = landing.raw_bytes

    def rots(live: torch.Tensor) -> torch.Tensor:
        if live.untyped_storage().data_ptr() == bad.untyped_storage().data_ptr():
            bad.view(torch.uint8)[0, 0] ^= 8
        return raw_bytes(live)

    monkeypatch.setattr(landing, "raw_bytes", rots)
    group.prepare()
    message = only_error(group.move(Refit(1, verify)), 2)
    assert message.startswith(f"{name}[[0, 96], [0, 64]]: the live tensor of engine rank 1 does not hold what trainer rank 0 sent")


def test_another_version_is_refused_by_both_numbers(make):
    group = make()
    group.prepare()
    message = only_error(group.move(Refit(2), Refit(3)), 1)
    assert "arrived at engine rank 0 as version 2, bucket 0; expected version 3, bucket 0" in message


# --- routes that do not fit the engine --------------------------------------------------------------------------

NORM = "model.norm.weight"


def refusal(group: Group, change=None, **places) -> str:
    """What `Landings.check` says when live tensors are replaced, or the slices of the bucket with the last norm."""
    route, landings = group.trainers[0].route, group.landings[0]
    known = {n: p for n, p in landings.places.items() if n not in places}
    new = {n: Place(known_box(landings, n), view) for n, view in places.items() if view is not None}
    if change:
        number, part = part_of(group, NORM)
        slices = change(list(route.buckets[number].slices), part)
        buckets = [dataclasses.replace(b, slices=tuple(slices)) if b.number == number else b for b in route.buckets]
        route = dataclasses.replace(route, buckets=tuple(buckets))
    with pytest.raises(RefitError) as caught:
        dataclasses.replace(landings, places=known | new).check(route)
    return str(caught.value)


def known_box(landings, name):
    return landings.places[name].box if name in landings.places else ((0, 4),)


def test_a_route_that_does_not_fit_the_live_tensors_is_refused_before_anything_moves(models):
    group = Group(models("dense"))
    group.landings[0].check(group.trainers[0].route)
    replace = dataclasses.replace
    for message, found in (
        (f"{NORM}: engine rank 0 has no such tensor, the trainer would send it", refusal(group, **{NORM: None})),
        ("stranger: 0 of the 4 values that engine rank 0 holds would arrive", refusal(group, stranger=torch.zeros(4))),
        (f"{NORM}: engine rank 0 holds float32, the trainer would send bfloat16", refusal(group, **{NORM: torch.zeros(64)})),
        (
            f"{NORM}: engine rank 0 holds shape [65] where its layout makes it [64]",
            refusal(group, **{NORM: torch.zeros(65, dtype=torch.bfloat16)}),
        ),
        (f"{NORM}: slice [(0, 64)] would be sent twice to engine rank 0", refusal(group, lambda parts, norm: [*parts, norm])),
        (
            f"{NORM}: slice [(30, 60)] would be sent twice to engine rank 0",
            refusal(group, lambda parts, norm: [*parts, replace(norm, box=((30, 60),))]),
        ),
        (f"{NORM}: 0 of the 64 values that engine rank 0 holds would arrive", refusal(group, lambda parts, norm: [p for p in parts if p != norm])),
        (
            f"{NORM}: 63 of the 64 values that engine rank 0 holds would arrive",
            refusal(group, lambda parts, norm: [replace(p, box=((0, 63),)) if p == norm else p for p in parts]),
        ),
        (
            f"{NORM}: slice [(1, 65)] is outside [(0, 64)], which engine rank 0 holds",
            refusal(group, lambda parts, norm: [replace(p, box=((1, 65),)) if p == norm else p for p in parts]),
        ),
    ):  # fmt: skip
        assert found == message


def test_missing_input_scales_and_bad_weights_are_refused_by_name(models):
    group = Group(models("moe"), Layout(ep=2, dp=2), format="fp8_per_tensor")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    group.trainers[1].source.input_scales = {k: v for k, v in group.trainers[1].source.input_scales.items() if k != name}
    group.trainers[0].check()
    with pytest.raises(RefitError, match=f"^{name}: no calibrated input scale"):
        group.trainers[1].check()
    group.weights[0]["decoder.layers.0.self_attention.linear_qkv.weight"][20, 3] = float("-inf")  # a key's row of the first group
    with pytest.raises(
        RefitError, match=r"^model\.layers\.0\.self_attn\.\w_proj\.weight: the trainer's weight holds NaN or Inf.*trainer rank 0\)"
    ):
        group.trainers[0].check()


# --- memory, parties --------------------------------------------------------------------------------------------


def test_buffers_that_do_not_fit_name_the_setting(make):
    group = make()
    for member in group.members:
        with pytest.raises(RefitError, match=r"not enough memory for two buckets of \d{19} bytes; lower refit\.bucket_mib"):
            member.link.buffers(1 << 62)


def test_parties_with_different_precision_tables_never_meet(models):
    group = Group(models("dense"))
    RefitSession(group.agreement, None, None, {"trainer rank 0": "aa", "engine 0": "aa"}, "full")
    with pytest.raises(RefitError, match="disagree about which tensors are FP8; table digests: trainer rank 0 aa, engine 0 bb"):
        RefitSession(group.agreement, None, None, {"trainer rank 0": "aa", "engine 0": "bb"}, "full")


# --- files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(models, tmp_path):
    """A group whose trainer has written version 1, and the file of the bucket with the last norm."""
    group = Group(models("dense"), transport="disk", root=str(tmp_path), **(SMALL | dict(timeout_s=1.0)))
    with group:
        group.prepare()
        group.trainers[0].send(Refit(1))
        number, _ = part_of(group, NORM)
        yield group, group.engines[0].link.root / f"v00000001/bucket{number:06d}.safetensors"


def test_a_damaged_file_is_named(written):
    group, path = written
    whole = path.read_bytes()
    group.engines[0].receive(Refit(1))
    unreadable = whole.replace(b'"header":"[', b'"header":"(')
    assert unreadable != whole
    for damage in (whole[: len(whole) // 2], whole[:4], b"", b"x" * 100, unreadable):
        path.write_bytes(damage)
        group.engines[0].join()
        group.engines[0].prepare()
        with pytest.raises(RefitError, match=rf"{path.name} does not hold bucket \d+ from trainer rank 0 of this route"):
            group.engines[0].receive(Refit(1))


def test_a_flipped_bit_of_a_file_names_tensor_and_slice(written):
    group, path = written
    values = reference(group.folder, group.table)[NORM].view(torch.uint8).numpy().tobytes()
    content = bytearray(path.read_bytes())
    at = content.index(values)
    content[at + 5] ^= 16
    path.write_bytes(content)
    with pytest.raises(RefitError, match=r"model\.norm\.weight\[\[0, 64\]\]: the live tensor of engine rank 0 does not hold"):
        group.engines[0].receive(Refit(1))


def test_a_missing_file_is_waited_for_no_longer_than_the_timeout(written):
    group, path = written
    path.unlink()
    with pytest.raises(RefitError, match=rf"{path.name} from trainer rank 0 did not appear within 1 s"):
        group.engines[0].receive(Refit(1))


def test_a_disk_that_cannot_be_written_is_named(models, tmp_path, monkeypatch):
    from trt_rl.refit.transports import disk

    group = Group(models("dense"), transport="disk", root=str(tmp_path))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with group:
        group.prepare()
        monkeypatch.setattr(disk, "save_file", full)
        with pytest.raises(RefitError, match=r"bucket000000\.safetensors cannot be written: .*No space left.*needs room in run\.folder"):
            group.trainers[0].send(Refit(1))
