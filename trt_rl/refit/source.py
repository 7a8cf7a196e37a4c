"""The trainer's side of a refit: what this rank holds, checked, and turned into buckets as the route says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import Layout
from trt_rl.refit.names import Box, hf_pieces, slices
from trt_rl.refit.precision import PrecisionTable, input_scale, per_tensor_scale, scale_name
from trt_rl.refit.quantize import grid_maxima, on_grid, quantize_blocks, quantize_per_tensor, scales_of, touched
from trt_rl.refit.route import Route, Slice
from trt_rl.refit.slot import Slot, write_digests


@dataclass
class Holding:
    """One rank's part of one HF tensor: views of Megatron parameters, with the box each of them is."""

    pieces: list[tuple[Box, torch.Tensor]]
    parameters: list[str]
    """Megatron name of each piece."""


@dataclass
class ShardSource:
    """Fills buckets from this rank's parameters, which must stay where they are in memory."""

    arch: Arch
    layout: Layout
    rank: int
    table: PrecisionTable
    route: Route
    named_parameters: Iterable[tuple[str, torch.Tensor]]
    tp_group: dist.ProcessGroup | None = None
    etp_group: dist.ProcessGroup | None = None
    input_scales: dict[str, float] = field(default_factory=dict)
    """Of every fp8_per_tensor weight, by HF name; see `trainer.calibrate`."""

    def __post_init__(self) -> None:
        at, self.held = self.layout.at(self.rank), {}
        self._parameters = list(self.named_parameters)
        for name, parameter in self._parameters:
            for piece in hf_pieces(name, self.arch, self.layout, at):
                holding = self.held.setdefault(piece.hf_name, Holding([], []))
                if piece.hf_box not in [box for box, _ in holding.pieces]:  # tied embeddings on one rank are one tensor
                    holding.pieces.append((piece.hf_box, parameter.detach()[slices(piece.local_box)]))
                    holding.parameters.append(name)
        self._cut = [n for n, held in self.held.items() if self.table.formats[n] == "fp8_block" and self._cuts_blocks(n, held)]
        self._per_tensor = [n for n in self.held if self.table.formats[n] == "fp8_per_tensor"]
        self.maxima: dict[str, torch.Tensor] = {}
        """Block maxima of tensors whose pieces cut blocks: `[grid]`, over whole blocks."""
        self.scales: dict[str, torch.Tensor] = {}
        """`[1]` scales of fp8_per_tensor weights."""

    @torch.no_grad()
    def check(self) -> None:
        """Look at all weights before the first byte moves.

        Raises:
            RefitError: a weight holds NaN or Inf, or an input scale is missing. Nothing was sent; engines still serve.
        """
        self._largest = self._parameter_maxima()
        for name in self._per_tensor:
            if name not in self.input_scales:
                raise RefitError(f"{name}: no calibrated input scale; fp8_per_tensor needs a calibration before the first refit")

    @torch.no_grad()
    def exchange(self) -> None:
        """Share maxima of what several ranks hold parts of. Collective over tensor-parallel groups; `check` comes first."""
        self._share_block_maxima()
        if self._per_tensor:
            self._share_tensor_scales(self._largest)

    def _parameter_maxima(self) -> torch.Tensor:
        values = [p.detach() for _, p in self._parameters]
        if values[0].is_cuda:
            together = torch.stack(torch._foreach_norm(values, ord=float("inf"))).float()
        else:  # one pass, where a norm takes several
            together = torch.stack([torch.stack(torch.aminmax(v)).abs().max() for v in values]).float()
        finite = torch.isfinite(together)
        if not bool(finite.all()):
            for (name, _), ok in zip(self._parameters, finite.tolist(), strict=True):
                if ok:
                    continue
                raise RefitError(
                    f"{self._first_bad(name)}: the trainer's weight holds NaN or Inf; the refit is refused (trainer rank {self.rank})"
                )
        return together

    def _first_bad(self, parameter: str) -> str:
        for hf_name, holding in self.held.items():
            for (_, values), name in zip(holding.pieces, holding.parameters, strict=True):
                if name == parameter and not torch.isfinite(values).all():
                    return hf_name
        return parameter

    def _share_block_maxima(self) -> None:
        """Exchange maxima of blocks that a cut runs through; all ranks of a group find the same tensors."""
        for name in self._cut:
            self.maxima[name] = grid_maxima(self.table.shapes[name], self.held[name].pieces)
            group = self._group(name)
            if group is not None:
                dist.all_reduce(self.maxima[name], op=dist.ReduceOp.MAX, group=group)

    def _cuts_blocks(self, name: str, holding: Holding) -> bool:
        """Whether any rank's piece of the tensor cuts a block; ranks of a group hold equal shares, so all agree."""
        shape = self.table.shapes[name]
        if not all(on_grid(box, shape) for box, _ in holding.pieces):
            return True
        covered = [sum(box[d][1] - box[d][0] for box, _ in holding.pieces) for d in range(len(shape))]
        return self._parts(name) > 1 and any(n < whole and n % 128 for n, whole in zip(covered, shape, strict=True))

    def _share_tensor_scales(self, largest: torch.Tensor) -> None:
        """One scale for all that one Megatron matrix holds (q, k and v; gate and up), as engines fuse the same.

        An engine that stores q, k and v under one scale would have to quantize again if theirs differed.
        """
        place = {name: i for i, (name, _) in enumerate(self._parameters)}
        for members in ([n for n in self._per_tensor if ".experts." not in n], [n for n in self._per_tensor if ".experts." in n]):
            if not members:
                continue
            amax = torch.stack([largest[place[self.held[n].parameters[0]]] for n in members])
            group = self._group(members[0])
            if group is not None:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
            scales = scales_of(amax)
            self.scales |= {n: scales[i : i + 1] for i, n in enumerate(members)}

    def _parts(self, name: str) -> int:
        return self.layout.etp if ".experts." in name else self.layout.tp

    def _group(self, name: str) -> dist.ProcessGroup | None:
        if self._parts(name) == 1:
            return None
        return self.etp_group if ".experts." in name else self.tp_group

    def values(self, part: Slice) -> torch.Tensor:
        """The trainer's own values of a weight slice, as a view of its parameter."""
        for box, view in self.held[part.name].pieces:
            if all(a <= start and stop <= b for (start, stop), (a, b) in zip(part.box, box, strict=True)):
                return view[tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(part.box, box, strict=True))]
        raise RefitError(f"{part.name}{list(part.box)}: trainer rank {self.rank} holds no piece that covers it")

    @torch.no_grad()
    def fill(self, slot: Slot, with_digests: bool) -> None:
        """Write the slices of a bucket, quantized as the table says: ModelOpt's path, on any device."""
        scales: dict[str, torch.Tensor] = {}
        for part in slot.plan.slices:
            target = slot.tensor(part)
            if part.name in scales:
                target.copy_(scales[part.name])
                continue
            format, values = self.table.formats[part.name], self.values(part)
            if format == "bf16":
                target.copy_(values)
            elif format == "fp8_per_tensor":
                target.copy_(quantize_per_tensor(values, self.scales[part.name]))
                scales[per_tensor_scale(part.name)] = self.scales[part.name]
                scales[input_scale(part.name)] = torch.tensor([self.input_scales[part.name]])
            else:
                amax = self.maxima.get(part.name)
                quantized, found = quantize_blocks(part.box, values, None if amax is None else amax[touched(part.box)])
                target.copy_(quantized)
                own = tuple(slice(-(-start // 128) - start // 128, None) for start, _ in part.box)
                scales[scale_name(part.name)] = found[own]
        if with_digests:
            write_digests(slot)
