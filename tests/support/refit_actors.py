"""Ray actors that stand for a trainer rank and for an engine, with faults that a test can order."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.support.reference import fingerprint, input_scales
from tests.support.refits import megatron_parameters
from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import Layout
from trt_rl.refit.landing import allocate
from trt_rl.refit.member import Agreement, EngineMember, TrainerMember
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit


class _Actor:
    """Faults are ordered by step, happen once, and are `raise`, `die` or what the actor's own method says."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.faults: dict[str, str] = {}
        self.member: TrainerMember | EngineMember | None = None

    def order(self, step: str, fault: str) -> None:
        self.faults[step] = fault

    def refit(self, step: str, *args: Any) -> Any:
        fault = self.faults.pop(step, None)
        if fault == "raise":
            raise RefitError(f"{step} was told to fail")
        if fault == "break":
            raise KeyError(f"{step} is broken")
        if fault == "die":
            os._exit(1)
        return getattr(self, step)(fault, *args)

    def join(self, fault: str | None) -> None:
        self.member.join()

    def disconnect(self, fault: str | None) -> None:
        if self.member:
            self.member.close()
            self.member = None

    def _answer(self, fault: str | None) -> list[str]:
        return ["another"] if fault == "digest" else [self.member.digest]


def _on_call(function, number: int, action):
    calls = iter(range(1 << 30))

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        if next(calls) == number:
            action()
        return result

    return wrapped


class TrainerActor(_Actor):
    """One trainer rank whose parameters are those of a checkpoint, times `scale`."""

    def __init__(self, folder: str, layout: Layout, rank: int, format: str) -> None:
        super().__init__()
        from trt_rl.trainer import cpu

        cpu.install()  # ModelOpt imports megatron
        import modelopt.torch.quantization.qtensor  # noqa: F401  takes seconds: not inside the first refit

        self.rank, self.layout, self.arch = rank, layout, Arch.load(folder)
        self.table = PrecisionTable.build(self.arch, PrecisionPolicy(format))
        self.weights = megatron_parameters(folder, layout, rank)

    def scale(self, factor: float) -> None:
        for tensor in self.weights.values():
            tensor.mul_(factor)

    def put(self, parameter: str, value: float) -> float:
        """Replace one value of a parameter; returns what it was."""
        if parameter not in self.weights:
            return 0.0
        place = self.weights[parameter].view(-1)
        before, place[7] = place[7].item(), value
        return before

    def agree(self, fault: str | None, agreement: Agreement) -> list[str]:
        scales = input_scales(self.table)
        self.member = TrainerMember(agreement, self.arch, self.table, self.rank, list(self.weights.items()), input_scales=scales)
        return self._answer(fault)

    def check(self, fault: str | None) -> None:
        self.member.check()

    def prepare(self, fault: str | None) -> None:
        self.member.prepare()

    def send(self, fault: str | None, refit: Refit) -> dict[str, Any]:
        if fault:
            action = {"fail midway": lambda: self.refit("boom"), "die midway": lambda: os._exit(1)}[fault]
            self.faults["boom"] = "raise"
            self.member.source.fill = _on_call(self.member.source.fill, 2, action)
        return self.member.send(refit).as_dict()


class EngineActor(_Actor):
    """The states of `RolloutEngine` around live tensors: version, and why nothing is served."""

    def __init__(self, folder: str, format: str) -> None:
        super().__init__()
        self.arch = Arch.load(folder)
        self.table = PrecisionTable.build(self.arch, PrecisionPolicy(format))
        self.version: int | None = None
        self.poisoned: str | None = "no weights yet"
        self.places: dict | None = None

    def agree(self, fault: str | None, agreement: Agreement, replica: int) -> list[str]:
        landings = allocate(self.arch, self.table, agreement.engine, replica)
        landings.label = agreement.label(replica)
        self.places = landings.places = self.places or landings.places  # addresses stay over reconnections
        self.member = EngineMember(agreement, self.arch, self.table, landings)
        return self._answer(fault)

    def prepare(self, fault: str | None, version: int) -> None:
        if fault == "memory":
            buffers = self.member.link.buffers
            self.member.link.buffers = lambda nbytes: buffers(1 << 62)
        self.member.prepare()

    def receive(self, fault: str | None, refit: Refit) -> list[dict[str, Any]]:
        self.poisoned = f"a refit to version {refit.version} has begun and not committed"
        load = self.member.target.load
        if fault == "die midway":
            self.member.target.load = _on_call(load, 2, lambda: os._exit(1))
        if fault == "flip":

            def flips(slot, verify):
                slot.raw(slot.plan.slices[0])[0] ^= 1
                load(slot, verify)

            self.member.target.load = flips
        try:
            return [self.member.receive(refit).as_dict()]
        except RefitError as error:
            self.poisoned = f"a refit failed: {error}"
            raise

    def commit(self, fault: str | None, version: int) -> None:
        self.version, self.poisoned = version, None

    def state(self) -> tuple[int | None, str | None, dict[str, Any]]:
        """Version, poison, and fingerprints of the live tensors."""
        return self.version, self.poisoned, {name: fingerprint(p.view) for name, p in (self.places or {}).items()}


class Party:
    """Actors behind the interface that `refit.session` needs, as TrainerGroup and RolloutPool have it."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors
        self.steps: list[tuple[str, list[int] | None]] = []

    def begin_refit(self, step: str, *args: Any, only: list[int] | None = None) -> list[Any]:
        self.steps.append((step, only))
        return [self.actors[i].refit.remote(step, *args) for i in (range(len(self.actors)) if only is None else only)]
