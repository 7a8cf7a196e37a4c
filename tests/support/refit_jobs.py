"""Refits between real Megatron ranks and engine ranks; functions that every rank of a distributed job runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.jobs import _setup
from tests.support.reference import fingerprint, input_scales
from tests.support.refits import raised, together
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.digest import digest
from trt_rl.refit.landing import allocate
from trt_rl.refit.member import Agreement, EngineMember, TrainerMember
from trt_rl.refit.names import Box
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.route import Placement
from trt_rl.refit.slot import Slot
from trt_rl.refit.stream import Refit
from trt_rl.refit.transports.link import Meeting


class Case(NamedTuple):
    format: str
    engine: EngineLayout
    nodes: int = 1
    """Over which the engine ranks are spread."""

    def __str__(self) -> str:
        engine = str(self.engine).replace("one rank, ", "").replace(" ", "")
        return f"{engine}-{self.format}" + (f"-{self.nodes}nodes" if self.nodes > 1 else "")


class Result(NamedTuple):
    held: dict[int, dict[str, Any]]
    """Engine rank -> wire name -> fingerprint."""
    digests: list[str]
    sent: int
    """Payload that this trainer rank sent."""


def refit_cases(folder: str, layout: Layout, cases: list[Case], bucket_bytes: int, port: int) -> list[Result]:
    """Refit engines of every case from one Megatron model; engine ranks are spread over the trainer's processes."""
    arch, model = _setup(folder, layout, "bf16")
    return [_refit(arch, model, layout, case, bucket_bytes, port, i) for i, case in enumerate(cases)]


def _refit(arch, model, layout: Layout, case: Case, bucket_bytes: int, port: int, generation: int) -> Result:
    from megatron.core import parallel_state

    table, rank = PrecisionTable.build(arch, PrecisionPolicy(case.format)), dist.get_rank()
    meeting = Meeting("127.0.0.1", port, layout.world + case.engine.world, layout.world, 60.0, generation)
    nodes = tuple(1 + i * case.nodes // case.engine.world for i in range(case.engine.world))
    agreement = Agreement(layout, case.engine, bucket_bytes, "gloo", meeting, Placement((0,) * layout.world, nodes))
    trainer = TrainerMember(
        agreement,
        arch,
        table,
        rank,
        model.named_parameters(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
        input_scales(table),
    )
    mine = [i for i in range(case.engine.world) if i % layout.world == rank]
    landings = {i: allocate(arch, table, case.engine, i) for i in mine}
    engines = [EngineMember(agreement, arch, table, landings[i]) for i in mine]
    raised(together(trainer.join, *[e.join for e in engines]))
    trainer.check()
    trainer.prepare()
    for engine in engines:
        engine.prepare()
    refit = Refit(version=generation)
    report, *_ = raised(together(lambda: trainer.send(refit), *[lambda e=e: e.receive(refit) for e in engines], timeout=90))
    dist.barrier()  # nobody leaves while another member is still served
    trainer.close()
    for engine in engines:
        engine.close()
    held = {i: {name: fingerprint(place.view) for name, place in landings[i].places.items()} for i in mine}
    return Result(held, [trainer.digest, *[e.digest for e in engines]], report.bytes)


def filled(folder: str, layout: Layout, format: str, bucket_bytes: int = 200_000) -> list[tuple[str, Box, torch.Tensor]]:
    """Every slice that this rank would send to an engine of one rank, with its digest compared; no link takes part."""
    from megatron.core import parallel_state

    arch, model = _setup(folder, layout, "bf16")
    table = PrecisionTable.build(arch, PrecisionPolicy(format))
    agreement = Agreement(layout, EngineLayout(), bucket_bytes, "gloo", Meeting("127.0.0.1", 1, layout.world + 1, layout.world, 5.0))
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    trainer = TrainerMember(agreement, arch, table, dist.get_rank(), model.named_parameters(), *groups, input_scales(table))
    trainer.check()
    trainer.source.exchange()
    found, device = [], next(model.parameters()).device
    for plan in trainer.route.sent_by(dist.get_rank()):
        slot = Slot(plan, torch.zeros(plan.nbytes, dtype=torch.uint8, device=device))
        trainer.source.fill(slot, True)
        slot = Slot(plan, slot.buffer.cpu())
        assert slot.digests.tolist() == [digest(slot.raw(part)) for part in plan.slices]
        found += [(part.name, part.box, slot.tensor(part).clone()) for part in plan.slices]
    return found


def refuse(folder: str, layout: Layout, format: str, parameter: str, value: float) -> str:
    """Put `value` into one of rank 0's parameters; what each rank's check says."""
    from trt_rl.errors import RefitError

    arch, model = _setup(folder, layout, "bf16")
    table = PrecisionTable.build(arch, PrecisionPolicy(format))
    if dist.get_rank() == 0:
        with torch.no_grad():
            dict(model.named_parameters())[parameter].view(-1)[3] = value
    agreement = Agreement(layout, EngineLayout(), 100_000, "gloo", Meeting("127.0.0.1", 1, layout.world + 1, layout.world, 5.0))
    trainer = TrainerMember(agreement, arch, table, dist.get_rank(), model.named_parameters(), input_scales=input_scales(table))
    try:
        trainer.check()
    except RefitError as error:
        return str(error)
    return ""


def calibrated_input_scales(folder: str, layout: Layout) -> dict[str, float]:
    """Input scales that a Megatron rank finds on the sample batch."""
    from tests.support.jobs import ready_batch, recipe, sample_batch
    from trt_rl.trainer.rank import MegatronRank

    trainer = MegatronRank(recipe(folder, layout, "fp32", refit={"format": "fp8_per_tensor"}))
    trainer.calibrate(ready_batch(sample_batch()))
    hooks = sum(len(m._forward_pre_hooks) for m in trainer.module.modules())
    assert hooks == 0, "calibration left hooks behind"
    return trainer.input_scales
