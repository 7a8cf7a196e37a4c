"""The route of a refit: which slice goes from which trainer rank to which engine ranks, in which bucket and round.

Computed once from both layouts. Every party computes it for itself and compares digests, so nothing but bytes
travels later: both ends of every transfer know what is in it. Deterministic, serializable, no torch.

How it is built:
  1. Every trainer rank holds boxes of HF tensors (`names`), every engine rank wants boxes (`engine_shards`). Where
     they meet is a slice; it goes straight from its holder to those who want it. Nothing is gathered first.
  2. Of several ranks that hold the same box (data-parallel replicas, norms), the one that sends least so far sends.
  3. Slices with the same sender and the same receivers share buckets. A weight and its scales share one bucket.
  4. Receivers of a bucket on one node form a chain: the first hears the trainer, each passes on to the next. So each
     node receives each byte once, and no rank sends a byte twice inside a node.
  5. Transfers are laid out in rounds. In a round a rank sends at most one bucket and receives at most one, and what it
     received in a round it passes on in the next: two buckets of memory are enough everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.engine_shards import wanted
from trt_rl.refit.names import Box, hf_pieces, parameters
from trt_rl.refit.precision import BLOCK, PrecisionTable, input_scale, per_tensor_scale, scale_name

ALIGN = 16  # bytes; every slice starts on a boundary that suits any dtype
HEADER_BYTES = 32  # version, bucket number, route digest, reserved: four int64
RELAYING = ("auto", "gloo", "nccl")
"""Transports over which engines of a node pass buckets on; with ipc and disk each engine reads what was written once."""
DTYPE_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}


@dataclass(frozen=True)
class Slice:
    """`payload[offset : offset + nbytes]` of a bucket is `name[box]`, row by row, in `dtype`."""

    name: str
    dtype: str
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True)
class BucketPlan:
    """What one bucket holds and where it goes. In memory: the slices, one 64-bit digest a slice, a header."""

    number: int
    sender: int
    chains: tuple[tuple[int, ...], ...]
    """Engine ranks, one chain a node."""
    slices: tuple[Slice, ...]

    @cached_property
    def data_bytes(self) -> int:
        last = self.slices[-1]
        return last.offset + _align(last.nbytes)

    @cached_property
    def nbytes(self) -> int:
        return self.data_bytes + 8 * len(self.slices) + HEADER_BYTES

    @property
    def where(self) -> str:
        return f"bucket {self.number} from trainer rank {self.sender}"


@dataclass(frozen=True)
class Turn:
    """What one member does in one round: at most one bucket out, at most one in. Members are trainer ranks first."""

    round: int
    send: tuple[int, int] | None = None
    """(bucket, member)."""
    receive: tuple[int, int] | None = None


@dataclass(frozen=True)
class Placement:
    """Node of every trainer rank and of every engine rank."""

    trainer: tuple[int, ...]
    engine: tuple[int, ...]

    @classmethod
    def packed(cls, layout: Layout, engine: EngineLayout, gpus_per_node: int, colocated: bool = False) -> Placement:
        """Ranks fill nodes one after the other; engines come after the trainer, or share its nodes."""
        first = 0 if colocated else -(-layout.world // gpus_per_node)
        return cls(tuple(r // gpus_per_node for r in range(layout.world)), tuple(first + r // gpus_per_node for r in range(engine.world)))


@dataclass(frozen=True)
class Route:
    trainers: int
    engines: int
    buckets: tuple[BucketPlan, ...]
    turns: dict[int, tuple[Turn, ...]] = field(compare=False)
    """By member, in order of rounds."""

    @classmethod
    def build(
        cls,
        arch: Arch,
        table: PrecisionTable,
        layout: Layout,
        engine: EngineLayout,
        bucket_bytes: int,
        placement: Placement | None = None,
        relay: bool = True,
    ) -> Route:
        """
        Args:
            bucket_bytes: upper limit of a bucket's payload.
            placement: nodes of all ranks; one node if left out.
            relay: engines of a node pass buckets on; if not, the sender serves each of them.

        Raises:
            RefitError: one row of a tensor does not fit a bucket, or trainer ranks hold no part of a tensor.
        """
        placement = placement or Placement((0,) * layout.world, (0,) * engine.world)
        units = _Units(arch, table, layout, engine, bucket_bytes, placement, relay)
        buckets = tuple(units.buckets())
        turns = _schedule(buckets, layout.world)
        return cls(layout.world, engine.world, buckets, turns)

    @cached_property
    def digest(self) -> int:
        """Of everything above, positive, fits an int64."""
        return int(hashlib.sha256(self.to_json().encode()).hexdigest()[:15], 16)

    def to_json(self) -> str:
        turns = {member: [(t.round, t.send, t.receive) for t in turns] for member, turns in self.turns.items()}
        buckets = [
            {"number": b.number, "sender": b.sender, "chains": b.chains, "slices": [vars(s) for s in b.slices]} for b in self.buckets
        ]
        return json.dumps([self.trainers, self.engines, buckets, turns])

    @classmethod
    def from_json(cls, text: str) -> Route:
        trainers, engines, buckets, turns = json.loads(text)

        def pair(value):
            return None if value is None else tuple(value)

        plans = tuple(
            BucketPlan(
                b["number"],
                b["sender"],
                tuple(map(tuple, b["chains"])),
                tuple(Slice(**{**s, "box": tuple(map(tuple, s["box"]))}) for s in b["slices"]),
            )
            for b in buckets
        )
        return cls(trainers, engines, plans, {int(m): tuple(Turn(r, pair(s), pair(v)) for r, s, v in ts) for m, ts in turns.items()})

    def sent_by(self, rank: int) -> list[BucketPlan]:
        return [b for b in self.buckets if b.sender == rank]

    def received_by(self, engine_rank: int) -> list[BucketPlan]:
        """In the order of arrival."""
        turns = self.turns.get(self.trainers + engine_rank, ())
        return [self.buckets[t.receive[0]] for t in turns if t.receive]

    def slot_bytes(self, member: int) -> int:
        """Largest bucket that `member` sends or receives; it needs two buffers of this size."""
        turns = self.turns.get(member, ())
        return max((self.buckets[move[0]].nbytes for t in turns for move in (t.send, t.receive) if move), default=0)

    def transfers(self) -> Iterator[tuple[int, int, int, int]]:
        """(round, source member, target member, bytes) of everything that moves."""
        for member, turns in self.turns.items():
            for turn in turns:
                if turn.send:
                    yield turn.round, member, turn.send[1], self.buckets[turn.send[0]].nbytes


def _align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _meet(a: Box, b: Box) -> Box | None:
    box = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def owned_blocks(box: Box) -> Box | None:
    """Range of blocks, per dimension, whose first element lies in `box`; None if there is none.

    Over disjoint boxes that cover a tensor, every block has exactly one owner, which sends its scale.
    """
    ranges = tuple((-(-start // BLOCK), -(-stop // BLOCK)) for start, stop in box)
    return ranges if all(a < b for a, b in ranges) else None


def volume(box: Box) -> int:
    total = 1
    for start, stop in box:
        total *= stop - start
    return total


_Part = tuple[str, str, Box, int]  # name, dtype, box, bytes


class _Units:
    """Slices that must travel together, in the order of the checkpoint, packed into buckets."""

    def __init__(self, arch, table, layout, engine, bucket_bytes, placement, relay) -> None:
        self.arch, self.table, self.engine, self.placement, self.relay = arch, table, engine, placement, relay
        self.capacity = bucket_bytes
        self.held = _held(arch, layout)
        self.shards = [engine.at(r) for r in range(engine.tp)]
        self.load = [0] * layout.world
        self.chain_cache: dict[tuple, tuple] = {}

    def buckets(self) -> Iterator[BucketPlan]:
        lanes: dict[tuple[int, tuple], list[list[list[_Part]]]] = {}
        filled: dict[tuple, int] = {}
        for sender, chains, unit in self._units():
            lane = (sender, chains)
            size = sum(_align(part[3]) + 8 for part in unit)
            packed = lanes.setdefault(lane, [])
            if not packed or filled[lane] + size > self.capacity:
                packed.append([])
                filled[lane] = 0
            packed[-1].append(unit)
            filled[lane] += size
        for number, (sender, chains, units) in enumerate(_interleave(lanes)):
            offset, slices = 0, []
            for name, dtype, box, nbytes in (part for unit in units for part in unit):
                slices.append(Slice(name, dtype, box, offset, nbytes))
                offset += _align(nbytes)
            yield BucketPlan(number, sender, chains, tuple(slices))

    def _units(self) -> Iterator[tuple[int, tuple, list[_Part]]]:
        for name, shape in self.table.shapes.items():
            sources = self.held.get(name)
            if not sources:
                raise RefitError(f"{name}: no trainer rank holds any part of it")
            targets: dict[Box, list[int]] = {}
            for tp, shard in enumerate(self.shards):
                if (box := wanted(name, shape, self.arch, self.engine, shard)) is not None:
                    targets.setdefault(box, []).append(tp)
            for target, tps in targets.items():
                first = True
                for source, ranks in sources.items():
                    if (box := _meet(source, target)) is None:
                        continue
                    for part in self._split(name, box):
                        unit = self._unit(name, part, first)
                        first = False
                        sender = min(ranks, key=lambda r: (self.load[r], r))
                        self.load[sender] += sum(p[3] for p in unit)
                        yield sender, self._chains(sender, tuple(tps)), unit

    def _unit(self, name: str, box: Box, first: bool) -> list[_Part]:
        format = self.table.formats[name]
        dtype = "bfloat16" if format == "bf16" else "float8_e4m3fn"
        unit = [(name, dtype, box, volume(box) * DTYPE_BYTES[dtype])]
        if format == "fp8_block" and (blocks := owned_blocks(box)):
            unit.append((scale_name(name), "float32", blocks, 4 * volume(blocks)))
        if format == "fp8_per_tensor" and first:  # every sender knows the tensor's one scale; the first to reach a target sends it
            unit += [(n, "float32", ((0, 1),), 4) for n in (per_tensor_scale(name), input_scale(name))]
        return unit

    def _split(self, name: str, box: Box) -> Iterator[Box]:
        """Row ranges of `box` that fit a bucket, cut on the block grid."""
        (top, bottom), rest = box[0], box[1:]
        format = self.table.formats[name]
        row, unit = (volume(rest) * 2, 1) if format == "bf16" else (volume(rest), BLOCK)

        def size(rows: int) -> int:
            """Bytes that `rows` rows take at most: values, scales, digests."""
            scales = {"bf16": 0, "fp8_per_tensor": 2 * (ALIGN + 8)}.get(format)
            if scales is None:
                scales = _align(4 * -(-rows // BLOCK) * -(-volume(rest) // BLOCK)) + 8
            return _align(rows * row) + 8 + scales

        if size(bottom - top) <= self.capacity:
            yield box
            return
        rows = self.capacity // row // unit * unit
        while rows and size(rows) > self.capacity:
            rows -= unit
        if not rows:
            need = -(-size(unit) // 2**20)
            raise RefitError(
                f"{name}: {unit} row(s) of {row} bytes do not fit a bucket of {self.capacity} bytes; set refit.bucket_mib to at least {need}"
            )
        start = top
        while start < bottom:
            stop = min(start // unit * unit + rows, bottom)
            yield ((start, stop), *rest)
            start = stop

    def _chains(self, sender: int, tps: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        key = (sender, tps)
        if key not in self.chain_cache:
            members = [replica * self.engine.tp + tp for replica in range(self.engine.replicas) for tp in tps]
            if self.relay:
                by_node: dict[int, list[int]] = {}
                for rank in members:
                    by_node.setdefault(self.placement.engine[rank], []).append(rank)
                # Senders begin at different members, so that passing on is everyone's share.
                chains = tuple(tuple(c[sender % len(c) :] + c[: sender % len(c)]) for c in by_node.values())
            else:
                chains = tuple((rank,) for rank in members)
            self.chain_cache[key] = chains
        return self.chain_cache[key]


def _held(arch: Arch, layout: Layout) -> dict[str, dict[Box, list[int]]]:
    """HF tensor -> box -> the trainer ranks that hold it."""
    held: dict[str, dict[Box, list[int]]] = {}
    known: dict[tuple[int, ...], list[tuple[str, Box]]] = {}  # data-parallel replicas hold the same
    for rank in range(layout.world):
        at = layout.at(rank)
        key = (at.tp, at.pp, at.etp, at.ep)
        if key not in known:
            pieces = (piece for parameter in parameters(arch, layout, at) for piece in hf_pieces(parameter, arch, layout, at))
            known[key] = [(piece.hf_name, piece.hf_box) for piece in pieces]
        for name, box in known[key]:
            held.setdefault(name, {}).setdefault(box, []).append(rank)
    return held


def _interleave(lanes: dict[tuple[int, tuple], list]) -> Iterator[tuple[int, tuple, list]]:
    """Buckets of all lanes in an order that keeps senders and receivers busy: each sender takes its lanes in turn,
    and different senders begin with different lanes."""
    queues: dict[int, list[tuple[tuple, list]]] = {}
    for (sender, chains), buckets in sorted(lanes.items()):
        queues.setdefault(sender, []).append((chains, list(buckets)))
    for sender, own in queues.items():
        shift = sender % len(own)
        own[:] = own[shift:] + own[:shift]
    ordered: dict[int, list] = {}
    for sender, own in queues.items():
        ordered[sender] = []
        for turn in range(max(len(buckets) for _, buckets in own)):
            ordered[sender] += [(sender, chains, buckets[turn]) for chains, buckets in own if turn < len(buckets)]
    for turn in range(max(map(len, ordered.values()), default=0)):
        for own in ordered.values():
            if turn < len(own):
                yield own[turn]


def _schedule(buckets: tuple[BucketPlan, ...], trainers: int) -> dict[int, tuple[Turn, ...]]:
    """Rounds in which every bucket's transfers happen; see the module's text, point 5."""
    sends: dict[tuple[int, int], tuple[int, int]] = {}
    receives: dict[tuple[int, int], tuple[int, int]] = {}
    free_from: dict[int, int] = {}

    def fits(bucket: BucketPlan, chain: tuple[int, ...], start: int) -> bool:
        source = bucket.sender
        for hop, rank in enumerate(chain):
            if (source, start + hop) in sends or (trainers + rank, start + hop) in receives:
                return False
            source = trainers + rank
        return True

    for bucket in buckets:
        earliest = free_from.get(bucket.sender, 0)
        for chain in bucket.chains:
            start = earliest
            while not fits(bucket, chain, start):
                start += 1
            source = bucket.sender
            for hop, rank in enumerate(chain):
                sends[source, start + hop] = (bucket.number, trainers + rank)
                receives[trainers + rank, start + hop] = (bucket.number, source)
                source = trainers + rank
            earliest = start + 1
        free_from[bucket.sender] = earliest

    by_member: dict[int, set[int]] = {}
    for member, round in (*sends, *receives):
        by_member.setdefault(member, set()).add(round)
    return {
        member: tuple(Turn(r, sends.get((member, r)), receives.get((member, r))) for r in sorted(rounds))
        for member, rounds in sorted(by_member.items())
    }
