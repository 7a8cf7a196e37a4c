"""The plain way to refit, kept as a yardstick: gather full BF16 tensors on the trainer, broadcast them to every engine
rank, and let each of them quantize everything and cut out its part.

Like the common stacks it works parameter by parameter, with bucketed broadcasts; the receiver's block quantization is
vectorized torch, not ModelOpt, so the comparison does not rest on a slow quantizer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.layout import Layout
from trt_rl.refit.landing import Landings
from trt_rl.refit.names import Piece, hf_pieces, parameters, slices
from trt_rl.refit.precision import BLOCK, PrecisionTable, scale_name
from trt_rl.refit.quantize import scales_of

_BUCKET = 1 << 28  # bytes a broadcast


class Baseline:
    """One member. Both sides walk the same list of parameters."""

    def __init__(self, arch: Arch, layout: Layout, table: PrecisionTable) -> None:
        self.arch, self.layout, self.table, self.shapes = arch, layout, table, arch.hf_shapes()
        self.local = [parameters(arch, layout, layout.at(rank)) for rank in range(layout.world)]
        self.names = list(dict.fromkeys(name for own in self.local for name in own))

    def send(self, rank: int, weights: dict[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> int:
        """Every trainer rank gathers every tensor; rank 0 broadcasts. Returns the bytes that this rank sent."""
        sent = 0
        for bucket in self._buckets():
            whole = {name: torch.empty(self.shapes[name], dtype=torch.bfloat16, device=device) for name in self._tensors(bucket)}
            for parameter in bucket:
                sent += self._gather(parameter, weights, whole, group, device)
            flat = torch.cat([tensor.flatten() for tensor in whole.values()])
            dist.broadcast(flat, 0)
            sent += flat.numel() * 2 * (dist.get_world_size() - self.layout.world) if rank == 0 else 0
        return sent

    def receive(self, landings: Landings, device: torch.device) -> None:
        for bucket in self._buckets():
            names, at = self._tensors(bucket), 0
            flat = torch.empty(sum(self._count(name) for name in names), dtype=torch.bfloat16, device=device)
            dist.broadcast(flat, 0)
            for name in names:
                self._load(name, flat[at : at + self._count(name)].view(self.shapes[name]), landings)
                at += self._count(name)

    def _pieces(self, parameter: str) -> Iterator[tuple[int, Piece]]:
        for rank, own in enumerate(self.local):
            if parameter in own:
                yield from ((rank, piece) for piece in hf_pieces(parameter, self.arch, self.layout, self.layout.at(rank)))

    def _tensors(self, bucket: list[str]) -> list[str]:
        return list(dict.fromkeys(piece.hf_name for parameter in bucket for _, piece in self._pieces(parameter)))

    def _count(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel()

    def _buckets(self) -> Iterator[list[str]]:
        bucket, filled = [], 0
        for parameter in self.names:
            size = 2 * sum(self._count(name) for name in self._tensors([parameter]))
            if bucket and filled + size > _BUCKET:
                yield bucket
                bucket, filled = [], 0
            bucket.append(parameter)
            filled += size
        yield bucket

    def _gather(self, parameter: str, weights, whole, group, device) -> int:
        """All-gather one parameter's shards and put them in their places."""
        shape = next(own[parameter] for own in self.local if parameter in own)
        mine = weights[parameter] if parameter in weights else torch.empty(shape, dtype=torch.bfloat16, device=device)
        shards = [torch.empty_like(mine) for _ in self.local]
        dist.all_gather(shards, mine.contiguous(), group=group)
        for rank, piece in self._pieces(parameter):
            whole[piece.hf_name][slices(piece.hf_box)] = shards[rank][slices(piece.local_box)]
        return mine.numel() * 2 * (self.layout.world - 1)

    def _load(self, name: str, weight: torch.Tensor, landings: Landings) -> None:
        """What an engine's loader does: quantize the full tensor, then copy the part that this rank owns."""
        tensors = {name: weight}
        if self.table.formats[name] == "fp8_block":
            rows, columns = weight.shape
            padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
            blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
            scales = scales_of(blocks.abs().amax((1, 3)))
            values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)[:rows, :columns]
            tensors = {name: values, scale_name(name): scales}
        for wire_name, tensor in tensors.items():
            if wire_name in landings.places:
                place = landings.places[wire_name]
                place.view.copy_(tensor[slices(place.box)])
