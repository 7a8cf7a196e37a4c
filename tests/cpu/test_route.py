"""The route alone: for any two layouts every value arrives once, from who holds it, in rounds that two buffers can serve."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout, Layout, divisors
from trt_rl.refit.engine_shards import violations
from trt_rl.refit.landing import expected_places
from trt_rl.refit.names import hf_pieces, parameters
from trt_rl.refit.precision import BLOCK, FORMATS, PrecisionPolicy, PrecisionTable, input_scale, per_tensor_scale, scale_name
from trt_rl.refit.route import ALIGN, HEADER_BYTES, Placement, Route, owned_blocks, volume

ROOT = Path(__file__).parents[2]
SIZES = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}


def make_arch(**changes) -> Arch:
    sizes = dict(
        model_type="qwen3_moe" if changes.get("experts") else "qwen3", hidden=128, layers=2, heads=4, kv_heads=2, head_dim=64,
        ffn=256, vocab=130, tied=False, rope_theta=1e6, rms_eps=1e-6, max_positions=64,
    )  # fmt: skip
    if changes.get("experts"):
        sizes |= dict(experts_per_token=2, moe_ffn=128, moe_layers=(0, 1))
    return Arch(**(sizes | changes))


class Problem(NamedTuple):
    arch: Arch
    table: PrecisionTable
    layout: Layout
    engine: EngineLayout
    capacity: int
    placement: Placement
    relay: bool

    def build(self) -> Route:
        return Route.build(*self)


@st.composite
def problems(draw) -> Problem:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    format, moe, tp = pick(*FORMATS), pick(True, False), pick(1, 2)
    engine_tp = pick(1, 2, 4)
    engine = EngineLayout(engine_tp, pick(*divisors(engine_tp)) if moe else 1, pick(1, 2, 3))
    ep = pick(1, 2, 4) if moe else 1
    layout = Layout(tp, pick(1, 2), ep=ep, etp=tp if ep == 1 else pick(1, tp), dp=pick(1, 2, 4))
    assume(not layout.violations() and layout.world <= 8)
    blocks = format == "fp8_block" and engine_tp > 1  # only then must sizes keep to the grid
    kv_heads = tp * pick(1, 2)
    heads = max(kv_heads * pick(1, 2), engine_tp)
    cut = engine_tp * tp
    arch = make_arch(
        hidden=128 if blocks else draw(st.integers(3, 40)) * 4,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128 if blocks else pick(8, 24, 80),
        ffn=128 * engine_tp if blocks else cut * draw(st.integers(1, 60)),
        vocab=draw(st.integers(3, 300)),
        tied=pick(True, False),
        **(dict(experts=4, moe_ffn=128 * engine.moe_tp if blocks else cut * draw(st.integers(1, 40)), moe_layers=pick((0, 1), (1,))) if moe else {}),
    )  # fmt: skip
    table = PrecisionTable.build(arch, PrecisionPolicy(format, bf16_first_layers=pick(0, 0, 1)))
    assert arch.layout_violations(layout) == [] and violations(arch, engine, table.formats, BLOCK, fused=False) == []
    nodes = st.integers(0, 2)
    placement = Placement(
        tuple(draw(st.lists(nodes, min_size=layout.world, max_size=layout.world))),
        tuple(draw(st.lists(nodes, min_size=engine.world, max_size=engine.world))),
    )
    return Problem(arch, table, layout, engine, draw(st.integers(1, 200)) * 1000, placement, pick(True, False))


def build(problem: Problem) -> tuple[Problem, Route]:
    """A route for `problem`, with the bucket size that the refusal of a smaller one names."""
    try:
        return problem, problem.build()
    except RefitError as error:
        problem = problem._replace(capacity=int(str(error).rsplit(" ", 1)[1]) * 2**20)
        return problem, problem.build()


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_wanted_value_arrives_exactly_once_from_who_holds_it(problem):
    problem, route = build(problem)
    arch, table, layout, engine = problem[:4]
    for rank in range(engine.world):
        wanted = expected_places(arch, table, engine, engine.at(rank))
        hits = {name: np.zeros([b - a for a, b in box], np.int8) for name, (_, box) in wanted.items()}
        for part in (part for bucket in route.received_by(rank) for part in bucket.slices):
            dtype, box = wanted[part.name]  # a KeyError: something arrives at a rank that does not want it
            assert part.dtype == dtype and part.nbytes == volume(part.box) * SIZES[dtype]
            assert all(a <= start < stop <= b for (start, stop), (a, b) in zip(part.box, box, strict=True))
            hits[part.name][tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(part.box, box, strict=True))] += 1
        assert not (wrong := [name for name, count in hits.items() if not (count == 1).all()]), wrong
    held = [boxes_of(arch, layout, rank) for rank in range(layout.world)]
    for bucket in route.buckets:
        for part in (p for p in bucket.slices if p.name in table.shapes):
            assert any(inside(part.box, box) for box in held[bucket.sender][part.name])


def boxes_of(arch: Arch, layout: Layout, rank: int) -> dict[str, list]:
    at, found = layout.at(rank), {}
    for parameter in parameters(arch, layout, at):
        for piece in hf_pieces(parameter, arch, layout, at):
            found.setdefault(piece.hf_name, []).append(piece.hf_box)
    return found


def inside(box, outer) -> bool:
    return all(a <= start and stop <= b for (start, stop), (a, b) in zip(box, outer, strict=True))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_buckets_keep_to_their_size_and_keep_weights_with_their_scales(problem):
    problem, route = build(problem)
    largest = Counter()
    for number, bucket in enumerate(route.buckets):
        assert bucket.number == number and bucket.nbytes - HEADER_BYTES <= problem.capacity
        end = 0
        for part in bucket.slices:
            assert part.offset % ALIGN == 0 and part.offset >= end
            end = part.offset + part.nbytes
        assert end <= bucket.data_bytes
        in_order = [(part.name, part.box) for part in bucket.slices]
        for part in (p for p in bucket.slices if problem.table.formats.get(p.name) == "fp8_block"):
            if blocks := owned_blocks(part.box):
                assert in_order[in_order.index((part.name, part.box)) + 1] == (scale_name(part.name), blocks)
        weights = {part.name for part in bucket.slices}
        scales = [p.name for p in bucket.slices if p.dtype == "float32"]
        known = {scale: n for n in weights for scale in (scale_name(n), per_tensor_scale(n), input_scale(n))}
        assert all(scale in known for scale in scales)
        for member in (bucket.sender, *(problem.layout.world + r for chain in bucket.chains for r in chain)):
            largest[member] = max(largest[member], bucket.nbytes)
    members = range(problem.layout.world + problem.engine.world)
    assert [route.slot_bytes(m) for m in members] == [largest[m] for m in members]
    assert [b for rank in range(problem.layout.world) for b in route.sent_by(rank)] == sorted(
        route.buckets, key=lambda b: (b.sender, b.number)
    )


@settings(max_examples=150, deadline=None)
@given(problems())
def test_rounds_pair_up_and_what_is_passed_on_came_one_round_before(problem):
    problem, route = build(problem)
    sends, receives = {}, {}
    for member, turns in route.turns.items():
        rounds = [turn.round for turn in turns]
        assert rounds == sorted(set(rounds))  # one turn a round, so one bucket each way
        for turn in turns:
            if turn.send:
                sends[turn.round, member, turn.send[1]] = turn.send[0]
            if turn.receive:
                receives[turn.round, turn.receive[1], member] = turn.receive[0]
    assert sends == receives
    trainers, arrived = problem.layout.world, Counter()
    for (round, source, target), number in sends.items():
        bucket = route.buckets[number]
        if source < trainers:
            assert source == bucket.sender
        else:
            hop = (round - 1, source, number)
            assert hop in {(r, to, n) for (r, _, to), n in receives.items()}
        arrived[number, target - trainers] += 1
    assert arrived == Counter((b.number, rank) for b in route.buckets for chain in b.chains for rank in chain)
    order = [[turn.send[0] for turn in route.turns.get(rank, ())] for rank in range(trainers)]
    # A sender that came back to a bucket would have to fill it twice.
    assert all(len({*numbers}) == sum(1 for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n) for numbers in order)
    expected = [(round, source, target, route.buckets[n].nbytes) for (round, source, target), n in sends.items()]
    assert sorted(route.transfers()) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_each_node_hears_each_value_once(problem):
    problem, route = build(problem._replace(relay=True))
    trainers, nodes = problem.layout.world, problem.placement.engine
    hits: dict[tuple, np.ndarray] = {}
    for bucket in route.buckets:
        assert len({frozenset(nodes[r] for r in chain) for chain in bucket.chains}) == len(bucket.chains)
    for member, turns in route.turns.items():
        for number, to in (turn.send for turn in turns if turn.send):
            node = nodes[to - trainers]
            if member >= trainers and nodes[member - trainers] == node:
                continue  # passed on inside the node
            for part in route.buckets[number].slices:
                if part.name in problem.table.shapes:
                    count = hits.setdefault((node, part.name), np.zeros(problem.table.shapes[part.name], np.int8))
                    count[tuple(slice(*side) for side in part.box)] += 1
    assert hits and all(count.max() == 1 for count in hits.values())


def test_without_relays_the_sender_serves_every_engine_itself():
    arch = make_arch()
    table = PrecisionTable.build(arch, PrecisionPolicy("bf16"))
    layout, engine = Layout(), EngineLayout(replicas=3)
    direct = Route.build(arch, table, layout, engine, 50_000, relay=False)
    assert {source for _, source, _, _ in direct.transfers()} == {0}
    relayed = Route.build(arch, table, layout, engine, 50_000)
    per_member = Counter(source for _, source, _, _ in relayed.transfers())
    assert per_member == {0: len(relayed.buckets), 1: len(relayed.buckets), 2: len(relayed.buckets)}


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_party_computes_the_same_route_and_can_read_anothers(problem):
    problem, route = build(problem)
    again = problem.build()
    copy = Route.from_json(route.to_json())
    for other in (again, copy):
        assert other == route and other.turns == route.turns and other.digest == route.digest
    assert 0 <= route.digest < 2**63


@pytest.mark.parametrize(
    "change",
    [
        dict(engine=EngineLayout(replicas=2)),
        dict(layout=Layout(pp=2)),
        dict(capacity=60_000),
        dict(relay=False),
        dict(placement=Placement((0, 0), (0, 1, 1))),
        dict(table=PrecisionTable.build(make_arch(), PrecisionPolicy("bf16"))),
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_digest_tells_routes_apart(change):
    arch = make_arch()
    table = PrecisionTable.build(arch, PrecisionPolicy("fp8_block"))
    problem = Problem(arch, table, Layout(dp=2), EngineLayout(replicas=3), 50_000, Placement((0, 0), (0, 0, 1)), True)
    assert problem.build().digest != problem._replace(**change).build().digest


# --- who sends, who gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=4), Layout(tp=2, etp=2, dp=2), Layout(cp=2)], ids=str)
def test_ranks_that_hold_the_same_share_the_sending(layout):
    arch = make_arch(layers=4, vocab=256)
    route = Route.build(arch, PrecisionTable.build(arch, PrecisionPolicy("bf16")), layout, EngineLayout(), 50_000)
    sent = [sum(b.nbytes for b in route.sent_by(rank)) for rank in range(layout.world)]
    assert max(sent) - min(sent) <= 0.1 * sum(sent) / layout.world


def test_experts_go_from_their_owner_to_their_owner_only():
    arch = make_arch(experts=8)
    layout, engine = Layout(ep=4, dp=4), EngineLayout(tp=2, ep=2, replicas=2)
    route = Route.build(arch, PrecisionTable.build(arch, PrecisionPolicy("fp8_block")), layout, engine, 200_000)
    seen = set()
    for bucket in route.buckets:
        for part in (p for p in bucket.slices if ".experts." in p.name):
            expert = int(part.name.split(".experts.")[1].split(".")[0])
            assert bucket.sender == expert // 2  # 8 experts over 4 trainer ranks
            assert {rank for chain in bucket.chains for rank in chain} == {expert // 4, 2 + expert // 4}
            seen.add(expert)
    assert seen == set(range(8))


def test_replicas_of_a_node_take_turns_at_the_head_of_the_chain():
    """Whoever hears the trainer passes on: with one head that would be the same engine for all senders."""
    arch = make_arch()
    route = Route.build(arch, PrecisionTable.build(arch, PrecisionPolicy("bf16")), Layout(dp=2), EngineLayout(replicas=2), 50_000)
    assert {b.sender: b.chains for b in route.buckets} == {0: ((0, 1),), 1: ((1, 0),)}


def test_ranks_are_packed_on_nodes():
    layout, engine = Layout(tp=4), EngineLayout(tp=2, replicas=4)
    assert Placement.packed(layout, engine, 8) == Placement((0,) * 4, (1,) * 8)
    assert Placement.packed(layout, engine, 4) == Placement((0,) * 4, (1,) * 4 + (2,) * 4)
    assert Placement.packed(layout, engine, 4, colocated=True) == Placement((0,) * 4, (0,) * 4 + (1,) * 4)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 300), st.integers(1, 48), st.floats(0, 2))
def test_no_bucket_exceeds_its_limit_however_close_the_fit(format, hidden, rows_of_blocks, slack):
    """A tall matrix brings a row of scales with each row of blocks: limits just above whole rows of blocks are critical."""
    arch = make_arch(hidden=hidden, kv_heads=4, heads=64, head_dim=128, vocab=3, layers=1)
    wide = ("*.o_proj", "*.down_proj")  # 128 of their rows would forbid small buckets
    table, scales = PrecisionTable.build(arch, PrecisionPolicy(format, exclude=wide)), 4 * rows_of_blocks * -(-hidden // 128)
    limit = rows_of_blocks * 128 * hidden + 16 + int(slack * (scales + 32))
    try:
        route = Route.build(arch, table, Layout(), EngineLayout(), limit)
    except RefitError:  # such refusals are tested below
        assume(False)
    assert max(bucket.nbytes for bucket in route.buckets) <= limit + HEADER_BYTES


@pytest.mark.parametrize(("format", "capacity", "message"), [
    ("bf16", 5_000, r"1 row\(s\) of 32768 bytes do not fit a bucket of 5000 bytes; set refit\.bucket_mib to at least 1"),
    ("fp8_block", 40_000, r"128 row\(s\) of 16384 bytes do not fit a bucket of 40000 bytes; set refit\.bucket_mib to at least 3"),
    ("fp8_per_tensor", 40_000, r"128 row\(s\) of 16384 bytes do not fit a bucket of 40000 bytes; set refit\.bucket_mib to at least 3"),
])  # fmt: skip
def test_a_bucket_smaller_than_a_row_names_the_setting(format, capacity, message):
    arch = make_arch(hidden=16384, layers=1)
    table = PrecisionTable.build(arch, PrecisionPolicy(format))
    with pytest.raises(RefitError, match=rf"^model\.\S+\.weight: {message}$"):
        Route.build(arch, table, Layout(), EngineLayout(), capacity)
    assert Route.build(arch, table, Layout(), EngineLayout(), 3 * 2**20).buckets


def test_routes_need_no_torch():
    code = """
import sys
from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.route import Route
arch = Arch("qwen3", 128, 2, 4, 2, 64, 256, 130, False, 1e6, 1e-6, 64)
route = Route.build(arch, PrecisionTable.build(arch, PrecisionPolicy()), Layout(tp=2), EngineLayout(), 100_000)
assert route.buckets and Route.from_json(route.to_json()).digest == route.digest
bad = [m for m in ("torch", "ray", "megatron", "numpy") if m in sys.modules]
sys.exit(str(bad) if bad else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
