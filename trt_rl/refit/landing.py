"""Where slices land: an engine rank's live tensors, un-fused, under Hugging Face names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout, EngineShard
from trt_rl.refit.digest import digest
from trt_rl.refit.engine_shards import wanted
from trt_rl.refit.names import Box
from trt_rl.refit.precision import BLOCK, PrecisionTable
from trt_rl.refit.route import Route, Slice, owned_blocks, volume
from trt_rl.refit.slot import Slot, raw_bytes
from trt_rl.refit.stream import Arrival


@dataclass(frozen=True)
class Place:
    """`view` is `tensor[box]` of the Hugging Face checkpoint, inside whatever the engine keeps it in."""

    box: Box
    view: torch.Tensor


@dataclass
class Landings:
    """All live tensors of one engine rank that a refit writes: wire name -> place. Addresses must not change."""

    places: dict[str, Place]
    rank: int = 0
    """Among the engine ranks of the route."""
    label: str = "engine rank 0"
    """What errors call this rank."""
    _arrived: list[Arrival] = field(default_factory=list)

    def view(self, part: Slice) -> torch.Tensor:
        box = self.places[part.name].box
        return self.places[part.name].view[tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(part.box, box, strict=True))]

    def check(self, route: Route) -> None:
        """Prove that the route writes every value of every live tensor exactly once, in the right type.

        Raises:
            RefitError: names the tensor, the engine rank, what it holds and what would arrive.
        """
        arriving: dict[str, list[Slice]] = {}
        for bucket in route.received_by(self.rank):
            for part in bucket.slices:
                arriving.setdefault(part.name, []).append(part)
        for name, parts in arriving.items():
            if name not in self.places:
                raise RefitError(f"{name}: {self.label} has no such tensor, the trainer would send it")
            place = self.places[name]
            found, expected = str(place.view.dtype).removeprefix("torch."), parts[0].dtype
            if found != expected:
                raise RefitError(f"{name}: {self.label} holds {found}, the trainer would send {expected}")
            if tuple(place.view.shape) != (shape := tuple(b - a for a, b in place.box)):
                raise RefitError(f"{name}: {self.label} holds shape {list(place.view.shape)} where its layout makes it {list(shape)}")
            for i, part in enumerate(parts):
                if any(not (a <= start < stop <= b) for (start, stop), (a, b) in zip(part.box, place.box, strict=True)):
                    raise RefitError(f"{name}: slice {list(part.box)} is outside {list(place.box)}, which {self.label} holds")
                if any(all(a < d and c < b for (a, b), (c, d) in zip(part.box, other.box, strict=True)) for other in parts[:i]):
                    raise RefitError(f"{name}: slice {list(part.box)} would be sent twice to {self.label}")
        for name, place in self.places.items():
            count = sum(volume(part.box) for part in arriving.get(name, []))
            if count != volume(place.box):
                raise RefitError(f"{name}: {count} of the {volume(place.box)} values that {self.label} holds would arrive")

    @torch.no_grad()
    def load(self, slot: Slot, verify: bool) -> None:
        """Write a bucket into the live tensors; if asked, read them back and compare digests with the sender's."""
        wrong, sent = [], slot.digests.tolist()
        for part, value in zip(slot.plan.slices, sent, strict=True):
            live = self.view(part)
            live.copy_(slot.tensor(part))
            if verify and digest(raw_bytes(live).cpu()) != value:
                wrong.append(part)
        self._arrived.append(Arrival(slot.plan, slot.header.tolist(), wrong, len(sent) if verify else 0))

    @torch.no_grad()
    def fetch(self, slot: Slot) -> None:
        """The reverse of `load`: what the live tensors hold now."""
        for part in slot.plan.slices:
            slot.tensor(part).copy_(self.view(part))

    def arrivals(self) -> list[Arrival]:
        done, self._arrived = self._arrived, []
        return done


def expected_places(arch: Arch, table: PrecisionTable, layout: EngineLayout, at: EngineShard) -> dict[str, tuple[str, Box]]:
    """Wire name -> (dtype, box) of everything that the engine rank at `at` holds, scales included."""
    found: dict[str, tuple[str, Box]] = {}
    for name, shape in table.shapes.items():
        if (box := wanted(name, shape, arch, layout, at)) is None:
            continue
        found[name] = ("bfloat16" if table.formats[name] == "bf16" else "float8_e4m3fn", box)
        for scale, scale_shape in table.scales(name).items():
            blocks = owned_blocks(box) if table.formats[name] == "fp8_block" else tuple((0, n) for n in scale_shape)
            assert blocks is not None, f"{name}: a rank's share is smaller than a block of {BLOCK}"  # the plan refuses such layouts
            found[scale] = ("float32", blocks)
    return found


def allocate(arch: Arch, table: PrecisionTable, layout: EngineLayout, rank: int, device: torch.device | str = "cpu") -> Landings:
    """Plain tensors for everything that engine rank `rank` holds: a receiver without an engine, for tests and benchmarks."""
    places = {
        name: Place(box, torch.zeros([b - a for a, b in box], dtype=getattr(torch, dtype), device=device))
        for name, (dtype, box) in expected_places(arch, table, layout, layout.at(rank)).items()
    }
    return Landings(places, rank, f"engine rank {rank}")
