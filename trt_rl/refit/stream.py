"""The two loops of a refit: a trainer rank sends its turns of the route, an engine rank receives, passes on and loads.

Each keeps two buffers. While one bucket is on the wire the next is quantized (sender) or the last one is loaded
(receiver). A member that meets bad data keeps its remaining appointments, so that no other member waits for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from trt_rl.errors import RefitError
from trt_rl.observe.span import Spans
from trt_rl.refit.route import BucketPlan, Route, Slice
from trt_rl.refit.slot import Slot
from trt_rl.refit.transports.link import Exchange, Link, PeerLost, Transfer

Verify = Literal["full", "sample", "off"]
_SAMPLE = 16  # `sample` looks at every sixteenth bucket, another set each time


@dataclass(frozen=True)
class Refit:
    """One refit, the same on every member."""

    version: int
    verify: Verify = "full"
    full: bool = True
    """Every bucket travels whole, and `sample` verifies all of them: the first refit of a group, or after a failure."""

    def verifies(self, bucket: int) -> bool:
        if self.verify == "sample":
            return self.full or (bucket + self.version) % _SAMPLE == 0
        return self.verify == "full"


@dataclass(frozen=True)
class Arrival:
    """What became of one bucket at an engine rank."""

    plan: BucketPlan
    header: list[int]
    mismatches: list[Slice]
    verified: int


class Source(Protocol):
    """Fills buckets; see `source.ShardSource` and `kernels.FusedSource`."""

    def fill(self, slot: Slot, with_digests: bool) -> None: ...


class Target(Protocol):
    """Takes buckets; see `landing.Landings` and `kernels.FusedLandings`."""

    label: str

    def fetch(self, slot: Slot) -> None:
        """Fill a slot with what the live tensors hold now."""

    def load(self, slot: Slot, verify: bool) -> None:
        """Write a slot into the live tensors and, if asked, compare them with what was sent."""

    def arrivals(self) -> list[Arrival]:
        """Of all buckets loaded since the last call; waits until they are."""


@dataclass
class Report:
    """What one member did in one refit. Seconds are of this member's own clock, by phase."""

    version: int
    bytes: int = 0
    """Payload that this member put on the wire (trainer), or that arrived for it (engine)."""
    saved_bytes: int = 0
    """Not sent because nothing in it had changed (`refit.delta`)."""
    buckets: int = 0
    verified: int = 0
    """Slices whose live values were compared with what was sent."""
    lost: list[int] = field(default_factory=list)
    """Members that ended while this one sent to them."""
    seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Sender:
    """One trainer rank's loop."""

    def __init__(self, route: Route, member: int, link: Link, source: Source) -> None:
        self.route, self.link, self.source = route, link, source
        self.turns = route.turns.get(member, ())
        self.buffer_bytes = route.slot_bytes(member)

    def prepare(self) -> None:
        """Raises:
        RefitError: not enough memory for two buckets.
        """
        self.buffers = self.link.buffers(self.buffer_bytes)

    def send(self, refit: Refit) -> Report:
        """Send everything that the route gives this rank; `prepare` comes first."""
        report, clock, lost = Report(refit.version), Spans(), set()
        under_way: list[list[tuple[Exchange, int]]] = [[], []]
        slot, which = None, 1
        self.link.begin(refit)
        for turn in self.turns:
            number, to = turn.send
            if slot is None or slot.plan.number != number:
                which = 1 - which
                with clock("wire"):
                    self._settle(under_way[which], lost)
                with clock("quantize"):
                    slot = Slot(self.route.buckets[number], self.buffers[which])
                    self.source.fill(slot, refit.verifies(number))
                    slot.write_header(refit.version, self.route.digest)
                report.buckets += 1
            if to not in lost:
                with clock("wire"):
                    try:
                        under_way[which].append((self.link.exchange(Transfer(slot.payload, to, number), None), to))
                    except PeerLost:
                        lost.add(to)
        with clock("wire"):
            for exchanges in under_way:
                self._settle(exchanges, lost)
            self.link.end()
        report.bytes, report.saved_bytes = self.link.take_counts()
        report.lost, report.seconds, self.buffers = sorted(lost), clock.total, []
        return report

    @staticmethod
    def _settle(exchanges: list[tuple[Exchange, int]], lost: set[int]) -> None:
        for exchange, to in exchanges:
            if to not in lost:
                try:
                    exchange.sent()
                except PeerLost:
                    lost.add(to)
        exchanges.clear()


class Receiver:
    """One engine rank's loop."""

    def __init__(self, route: Route, member: int, link: Link, target: Target) -> None:
        self.route, self.link, self.target = route, link, target
        self.turns = route.turns.get(member, ())
        self.buffer_bytes = route.slot_bytes(member)

    def prepare(self) -> None:
        """Raises:
        RefitError: not enough memory for two buckets.
        """
        self.buffers = self.link.buffers(self.buffer_bytes)

    def receive(self, refit: Refit) -> Report:
        """Receive, pass on, load and verify everything that the route brings here; `prepare` comes first.

        Raises:
            RefitError: names the sender that ended, or the tensor, slice and rank that does not hold what was sent. All
                appointments were kept by then, unless the sender is gone.
        """
        report, clock, lost = Report(refit.version), Spans(), set()
        arrived: tuple[Slot, int] | None = None  # received in the turn before, not loaded yet
        self.kept = False
        self.link.begin(refit)
        for turn in self.turns:
            coming, passes_on = None, turn.send and turn.send[1] not in lost
            if turn.receive:
                coming = Slot(self.route.buckets[turn.receive[0]], self.buffers[report.buckets % 2])
                report.buckets += 1
                report.bytes += coming.plan.nbytes
                if self.link.overlays and not refit.full:
                    with clock("load"):
                        self.target.fetch(coming)
            with clock("wire"):
                exchange = self.link.exchange(
                    Transfer(arrived[0].payload, turn.send[1], turn.send[0]) if passes_on else None,
                    Transfer(coming.payload, turn.receive[1], turn.receive[0]) if coming else None,
                )
            if arrived:
                with clock("load"):
                    self._load(refit, *arrived)
            with clock("wire"):
                if passes_on:
                    try:
                        exchange.sent()
                    except PeerLost:
                        lost.add(turn.send[1])
                arrived = (Slot(coming.plan, exchange.received()), turn.receive[1]) if coming else None
        if arrived:
            with clock("load"):
                self._load(refit, *arrived)
        with clock("verify"):
            arrivals = self.target.arrivals()
        self.link.end()
        self.kept = True  # every appointment; what follows concerns nobody else
        report.lost, report.seconds, self.buffers = sorted(lost), clock.total, []
        self.link.take_counts()
        self._judge(arrivals, refit, report)
        return report

    def _load(self, refit: Refit, slot: Slot, sender: int) -> None:
        self.target.load(slot, refit.verifies(slot.plan.number))
        self.link.release(slot.payload, sender)

    def _judge(self, arrivals: list[Arrival], refit: Refit, report: Report) -> None:
        for arrival in arrivals:
            expected = [refit.version, arrival.plan.number, self.route.digest, 0]
            if arrival.header != expected:
                raise RefitError(
                    f"{arrival.plan.where} arrived at {self.target.label} as version {arrival.header[0]}, bucket "
                    f"{arrival.header[1]}; expected version {refit.version}, bucket {arrival.plan.number}"
                    + (", and it follows another route" if arrival.header[2] != self.route.digest else "")
                )
        wrong = [(arrival.plan, part) for arrival in arrivals for part in arrival.mismatches]
        if wrong:
            plan, part = wrong[0]
            raise RefitError(
                f"{part.name}{[list(side) for side in part.box]}: the live tensor of {self.target.label} does not hold "
                f"what trainer rank {plan.sender} sent ({part.dtype}, {part.nbytes} bytes; {len(wrong)} slice(s) differ)"
            )
        report.verified = sum(arrival.verified for arrival in arrivals)
