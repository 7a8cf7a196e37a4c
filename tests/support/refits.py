"""Refits inside one process: members in threads, trainer ranks whose parameters come from Hugging Face files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.reference import input_scales
from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.hf_files import HFFolder
from trt_rl.refit.landing import Landings, allocate
from trt_rl.refit.member import Agreement, EngineMember, TrainerMember
from trt_rl.refit.names import hf_pieces, parameters, slices
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.route import Placement
from trt_rl.refit.stream import Refit, Report, Verify
from trt_rl.refit.transports.link import Meeting

ONE_RANK, ONE_ENGINE = Layout(), EngineLayout()


def megatron_parameters(folder: Path | str, layout: Layout, rank: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """What a Megatron rank of `layout` would hold of the checkpoint, in BF16."""
    arch, at, found = Arch.load(folder), layout.at(rank), {}
    files = HFFolder(folder, arch)
    for name, shape in parameters(arch, layout, at).items():
        found[name] = torch.zeros(shape, dtype=torch.bfloat16)
        for piece in hf_pieces(name, arch, layout, at):
            found[name][slices(piece.local_box)] = (files.read(piece.hf_name, piece.hf_box) * scale).bfloat16()
    return found


def together(*functions: Callable[[], Any], timeout: float = 60) -> list[Any]:
    """Run each function in a thread of its own; results in order, with the exception where one was raised."""
    results: list[Any] = [TimeoutError(f"still running after {timeout} s")] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:  # noqa: BLE001  the caller judges it
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    return results


def raised(results: list[Any]) -> list[Any]:
    """`results`, unless one of them is an exception: then that is raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def open_store() -> dist.TCPStore:
    """The meeting point of a group, on a port that is bound already."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Group:
    """Trainer and engine members of one refit group. Layouts without tensor parallelism only, or tensors whose cuts
    keep to the block grid: there is no process group to share maxima over."""

    def __init__(
        self,
        folder: Path | str,
        layout: Layout = ONE_RANK,
        engine: EngineLayout = ONE_ENGINE,
        format: str = "fp8_block",
        bucket_bytes: int = 100_000,
        transport: str = "gloo",
        placement: Placement | None = None,
        delta: bool = False,
        timeout_s: float = 20.0,
        root: str = "",
        scale: float = 1.0,
    ) -> None:
        self.folder, self.store, self.arch = folder, open_store(), Arch.load(folder)
        self.table = PrecisionTable.build(self.arch, PrecisionPolicy(format))
        members = layout.world + engine.world
        meeting = Meeting("127.0.0.1", self.store.port, members, layout.world, timeout_s, folder=root)
        self.agreement = Agreement(layout, engine, bucket_bytes, transport, meeting, placement, delta)
        self.weights = [megatron_parameters(folder, layout, rank, scale) for rank in range(layout.world)]
        self.landings: list[Landings] = [allocate(self.arch, self.table, engine, rank) for rank in range(engine.world)]
        scales = input_scales(self.table)
        self.trainers = [
            TrainerMember(self.agreement, self.arch, self.table, rank, list(weights.items()), input_scales=scales)
            for rank, weights in enumerate(self.weights)
        ]
        self.engines = [EngineMember(self.agreement, self.arch, self.table, landings) for landings in self.landings]

    def __enter__(self) -> Group:
        raised(together(*[m.join for m in self.members]))
        return self

    def __exit__(self, *_) -> None:
        for member in self.members:
            member.close()

    @property
    def members(self) -> list[TrainerMember | EngineMember]:
        return [*self.trainers, *self.engines]

    def prepare(self) -> None:
        for trainer in self.trainers:
            trainer.check()
        for member in self.members:
            member.prepare()

    def move(self, refit: Refit, engine_refit: Refit | None = None, timeout: float = 60) -> list[Any]:
        """Reports of all members, trainer ranks first, with the exception in place of a report where one was raised."""
        return together(
            *[lambda t=t: t.send(refit) for t in self.trainers],
            *[lambda e=e: e.receive(engine_refit or refit) for e in self.engines],
            timeout=timeout,
        )

    def refit(self, version: int = 1, verify: Verify = "full", full: bool = True) -> tuple[list[Report], list[Report]]:
        """Reports of trainers and engines of a refit that has to succeed."""
        self.prepare()
        reports = raised(self.move(Refit(version, verify, full)))
        return reports[: len(self.trainers)], reports[len(self.trainers) :]

    def held(self, rank: int = 0) -> dict[str, torch.Tensor]:
        return {name: place.view for name, place in self.landings[rank].places.items()}


def connect(engine: Any, folder: Path | str, scale: float = 1.0) -> TrainerMember:
    """Join `engine`, a started RolloutEngine, with a trainer of one rank that holds the checkpoint times `scale`."""
    store, layout = open_store(), getattr(engine, "layout", ONE_ENGINE)
    meeting = Meeting("127.0.0.1", store.port, 1 + layout.world, 1, 20.0)
    agreement = Agreement(ONE_RANK, layout, 100_000, "gloo", meeting)
    weights = list(megatron_parameters(folder, ONE_RANK, 0, scale).items())
    trainer = TrainerMember(agreement, engine.arch, engine.table, 0, weights, input_scales=input_scales(engine.table))
    assert engine.agree_refit(agreement, 0) == [trainer.digest] * layout.world
    raised(together(trainer.join, engine.join_refit))
    trainer.store = store  # lives as long as the trainer
    return trainer


def move(trainer: TrainerMember, engine: Any, version: int) -> None:
    """Everything of a refit up to the commit."""
    trainer.check()
    trainer.prepare()
    engine.prepare_refit(version)
    raised(together(lambda: trainer.send(Refit(version)), lambda: engine.receive_refit(Refit(version))))


def refit_engine(engine: Any, folder: Path | str, version: int, scale: float = 1.0) -> None:
    """A whole refit of one engine, from joining to leaving."""
    trainer = connect(engine, folder, scale=scale)
    move(trainer, engine, version)
    engine.commit_refit(version)
    engine.disconnect_refit()
    trainer.close()
