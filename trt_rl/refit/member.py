"""What the two sides of a refit agree on, and one member of either side."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.landing import Landings
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.route import RELAYING, Placement, Route
from trt_rl.refit.source import ShardSource
from trt_rl.refit.staging import Staging
from trt_rl.refit.stream import Receiver, Refit, Report, Sender
from trt_rl.refit.transports import open_link
from trt_rl.refit.transports.delta import DeltaLink
from trt_rl.refit.transports.link import Link, Meeting


@dataclass(frozen=True)
class Agreement:
    """Everything that the route and the link follow from, besides the model and its precision table."""

    trainer: Layout
    engine: EngineLayout
    """Of the replicas that take part."""
    bucket_bytes: int
    transport: str
    meeting: Meeting
    placement: Placement | None = None
    delta: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Agreement:
        raw = json.loads(text)
        place = raw["placement"]
        return cls(
            Layout(**raw["trainer"]),
            EngineLayout(**raw["engine"]),
            raw["bucket_bytes"],
            raw["transport"],
            Meeting(**raw["meeting"]),
            Placement(tuple(place["trainer"]), tuple(place["engine"])) if place else None,
            raw["delta"],
        )

    @property
    def on_gpu(self) -> bool:
        """Whether buckets are in GPU memory; gloo and disk keep them in the host's, where ModelOpt's path fills them."""
        return self.transport in ("nccl", "ipc")

    def label(self, engine_rank: int) -> str:
        """What errors call the `engine_rank`-th engine rank of this group."""
        return self.meeting.name(self.trainer.world + engine_rank)

    def route(self, arch: Arch, table: PrecisionTable) -> Route:
        return Route.build(
            arch,
            table,
            self.trainer,
            self.engine,
            self.bucket_bytes,
            self.placement,
            relay=self.transport in RELAYING,
        )


class _Member:
    """Shared by both sides: a route, and a link over it."""

    digest: str
    """Of the precision table and the route; all members must have the same."""

    def __init__(self, agreement: Agreement, arch: Arch, table: PrecisionTable, link_member: int) -> None:
        self.agreement, self.arch, self.table = agreement, arch, table
        self.route = agreement.route(arch, table)
        self.digest = f"{table.digest}-{self.route.digest:016x}"
        self.link_member = link_member
        self.link: Link | None = None

    def join(self) -> None:
        """Join the link. Collective.

        Raises:
            RefitError: the transport is unknown or cannot do what was agreed, or somebody did not come.
        """
        transport, delta = self.agreement.transport, self.agreement.delta
        if delta and transport not in ("gloo", "nccl"):
            raise RefitError(f"refit.delta = true works with refit.transport gloo or nccl, not {transport}")
        link = open_link(transport, self.agreement.meeting, self.link_member, self.route)
        self.link = DeltaLink(link, self.route) if delta else link

    def close(self) -> None:
        """Leave. Whoever waits for this member hears of it."""
        if self.link is not None:
            self.link.close()
            self.link = None


class TrainerMember(_Member):
    """A trainer rank's end of the refit."""

    def __init__(
        self,
        agreement: Agreement,
        arch: Arch,
        table: PrecisionTable,
        rank: int,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        tp_group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        input_scales: dict[str, float] | None = None,
    ) -> None:
        super().__init__(agreement, arch, table, rank)
        named_parameters, self.rank = list(named_parameters), rank
        kind = ShardSource
        if named_parameters[0][1].is_cuda and agreement.on_gpu:
            from trt_rl.refit.kernels import FusedSource as kind
        groups = tp_group, etp_group
        self.source = kind(arch, agreement.trainer, rank, table, self.route, named_parameters, *groups, input_scales or {})

    def check(self) -> None:
        """Refuse weights that cannot be sent, before the first byte moves."""
        self.source.check()

    def prepare(self) -> None:
        """Share maxima of cut tensors and reserve buffers. Collective over tensor-parallel groups; `check` comes first."""
        self.source.exchange()
        self.sender = Sender(self.route, self.rank, self.link, self.source)
        self.sender.prepare()

    def send(self, refit: Refit) -> Report:
        try:
            return self.sender.send(refit)
        except BaseException:
            self.close()  # engines must not wait for what will not come
            raise


class EngineMember(_Member):
    """An engine rank's end of the refit."""

    def __init__(self, agreement: Agreement, arch: Arch, table: PrecisionTable, landings: Landings | Staging) -> None:
        """
        Args:
            landings: live tensors to write to, or the staging of an engine that loads whole tensors by itself.
        """
        super().__init__(agreement, arch, table, agreement.trainer.world + landings.rank)
        landings.check(self.route)
        self.target = landings
        if isinstance(landings, Landings) and agreement.on_gpu and any(p.view.is_cuda for p in landings.places.values()):
            from trt_rl.refit.kernels import FusedLandings

            self.target = FusedLandings(landings)

    def prepare(self) -> None:
        self.receiver = Receiver(self.route, self.link_member, self.link, self.target)
        self.receiver.prepare()

    def receive(self, refit: Refit) -> Report:
        try:
            return self.receiver.receive(refit)
        except BaseException:
            if not self.receiver.kept:  # whoever listens to this member must not wait
                self.close()
            raise
