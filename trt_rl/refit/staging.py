"""For engines whose own loader takes whole Hugging Face tensors: slices are joined in staging memory and handed over.

Tensors that an engine fuses (q, k and v; gate and up; a weight and its scale) are handed over together, since a loader may
fill a fused parameter from all of its parts at once. Groups wait until they fill a bucket, so that the loader is not
called once for every expert. What arrived is compared with the sender's digests here, in the bucket; what the loader
made of it is compared afterwards by whoever can read the engine's live tensors (`LiveCheck`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.digest import digest
from trt_rl.refit.landing import Landings, Place, expected_places
from trt_rl.refit.names import Box, slices
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.route import Route, Slice, volume
from trt_rl.refit.slot import Slot, raw_bytes
from trt_rl.refit.stream import Arrival

Loader = Callable[[dict[str, torch.Tensor]], None]
_FUSED = re.compile(r"(.*\.self_attn)\.[qkv]_proj\..*|(.*\.mlp)\.(?:gate|up)_proj\..*|(.*\.mlp\.experts\.\d+)\..*")


def fused_group(name: str) -> str:
    """What a tensor must be handed over with: tensors of one group have equal keys."""
    if match := _FUSED.fullmatch(name):
        return next(at for at in match.groups() if at)
    return name.rsplit(".", 1)[0]


@dataclass
class Staging:
    """A refit's target that joins slices and gives whole tensors to `loader`; see `stream.Target`."""

    arch: Arch
    table: PrecisionTable
    layout: EngineLayout
    rank: int
    """Among the engine ranks of the route."""
    device: torch.device
    loader: Loader
    hand_over_bytes: int
    label: str = "engine rank 0"
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _missing: dict[str, int] = field(default_factory=dict)  # values, by group
    _complete: dict[str, torch.Tensor] = field(default_factory=dict)
    _arrived: list[Arrival] = field(default_factory=list)
    _failure: RefitError | None = None
    peak_bytes: int = 0
    """Most that staging held at once, in the refit under way or the last one."""

    def __post_init__(self) -> None:
        self._expected = expected_places(self.arch, self.table, self.layout, self.layout.at(self.rank))
        self._members: dict[str, list[str]] = {}
        for name in self._expected:
            self._members.setdefault(fused_group(name), []).append(name)

    def check(self, route: Route) -> None:
        """Prove that the route brings every value of every tensor exactly once; see `Landings.check`."""
        places = {n: Place(box, torch.empty(_shape(box), dtype=getattr(torch, t), device="meta")) for n, (t, box) in self._expected.items()}
        Landings(places, self.rank, self.label).check(route)

    def reset(self) -> None:
        """Forget what an earlier refit left behind."""
        self._tensors, self._complete, self._arrived, self._failure, self.peak_bytes = {}, {}, [], None, 0
        self._missing = {group: sum(volume(self._expected[n][1]) for n in names) for group, names in self._members.items()}

    def fetch(self, slot: Slot) -> None:
        raise RefitError("an engine that loads whole tensors keeps none of them; turn refit.delta off")

    @torch.no_grad()
    def load(self, slot: Slot, verify: bool) -> None:
        """Join a bucket's slices to their tensors; hand complete groups over when they fill a bucket."""
        wrong = self._wrong(slot) if verify else []
        for part in slot.plan.slices:
            if part.name not in self._tensors:
                dtype, box = self._expected[part.name]
                self._tensors[part.name] = torch.empty(_shape(box), dtype=getattr(torch, dtype), device=self.device)
            self._tensors[part.name][slices(part.box)] = slot.tensor(part)
            group = fused_group(part.name)
            self._missing[group] -= volume(part.box)
            if self._missing[group] == 0:
                for name in self._members[group]:
                    self._complete[name] = self._tensors.pop(name)
        self._arrived.append(Arrival(slot.plan, slot.header.tolist(), wrong, len(slot.plan.slices) if verify else 0))
        held = _nbytes(self._complete)
        self.peak_bytes = max(self.peak_bytes, held + _nbytes(self._tensors))
        if held >= self.hand_over_bytes:
            self._hand_over()

    def _wrong(self, slot: Slot) -> list[Slice]:
        """Slices of a bucket that are not what its sender put in."""
        found = digests([slot.raw(part) for part in slot.plan.slices])
        return [part for part, a, b in zip(slot.plan.slices, found, slot.digests.tolist(), strict=True) if a != b]

    def _hand_over(self) -> None:
        """A loader's failure is told at the end: until then other members may depend on this one passing buckets on."""
        ready, self._complete = self._complete, {}
        if ready and self._failure is None and not any(arrival.mismatches for arrival in self._arrived):
            try:
                self.loader(ready)
            except RefitError as error:
                self._failure = error

    def arrivals(self) -> list[Arrival]:
        """Of all buckets since the last call.

        Raises:
            RefitError: a tensor did not arrive completely, or the loader refused one.
        """
        done, self._arrived = self._arrived, []
        if any(arrival.mismatches for arrival in done):
            return done  # the receiver names them; nothing more is loaded
        if lacking := [group for group, missing in self._missing.items() if missing]:
            raise RefitError(f"{lacking[0]}: {self._missing[lacking[0]]} values did not arrive at {self.label}")
        self._hand_over()
        if self._failure:
            raise self._failure
        return done


@dataclass
class LiveCheck:
    """Compares what a loader wrote with what it was given, by digests: the given tensors need not be kept.

    `live` maps a wire name to the part of the tensor that this rank holds and to its view in the engine.
    """

    live: dict[str, Place]
    label: str
    expected: dict[str, int] = field(default_factory=dict)

    def given(self, tensors: dict[str, torch.Tensor]) -> None:
        """Remember this rank's part of tensors that go to the loader now."""
        mine = [name for name in tensors if name in self.live]
        self.expected |= zip(mine, digests([tensors[n][slices(self.live[n].box)] for n in mine]), strict=True)

    def compare(self) -> int:
        """Number of live tensors compared, all of them equal.

        Raises:
            RefitError: names the tensor, its slice and the rank, or a live tensor that nothing was given for.
        """
        expected, self.expected = self.expected, {}
        for name in self.live:
            if name not in expected:
                raise RefitError(f"{name}: nothing was loaded into the live tensor of {self.label}")
        found = digests([self.live[name].view for name in expected])
        for name, value in zip(expected, found, strict=True):
            if value != expected[name]:
                box = [list(side) for side in self.live[name].box]
                raise RefitError(f"{name}{box}: the live tensor of {self.label} does not hold what was given to the engine's loader")
        return len(found)


def digests(tensors: list[torch.Tensor]) -> list[int]:
    """Digest of each tensor's bytes, where it lies."""
    if tensors and tensors[0].is_cuda:
        from trt_rl.refit.kernels import digest_views

        return digest_views(tensors)
    return [digest(raw_bytes(tensor)) for tensor in tensors]


def _shape(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())
