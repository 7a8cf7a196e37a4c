"""The trainer's side of a refit: walk this rank's parameters, quantize what the table says, fill buckets.

First form of the route: every owning rank sends each of its pieces to every engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import Layout
from trt_rl.refit.bucket import Bucket, BucketWriter
from trt_rl.refit.names import Box, hf_pieces, owns, slices
from trt_rl.refit.precision import BLOCK, PrecisionTable, scale_name
from trt_rl.refit.quantize import block_maxima, exchange_maxima, owned_blocks, quantize_pieces
from trt_rl.refit.transport import GlooLink

Pieces = list[tuple[Box, torch.Tensor]]  # where in the HF tensor, and the values


@dataclass(frozen=True)
class ShardSource:
    """What one trainer rank contributes to a refit."""

    arch: Arch
    layout: Layout
    rank: int
    table: PrecisionTable
    tp_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    bucket_bytes: int

    @torch.no_grad()
    def buckets(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        """Quantized (or BF16) slices of every parameter that this rank owns.

        Raises:
            RefitError: a parameter cannot be mapped, or holds NaN or Inf.
        """
        owned = list(self._owned(parameters))
        maxima = self._exchange_maxima(owned)
        writer = BucketWriter(self.bucket_bytes)
        for name, pieces, _ in owned:
            yield from writer.add(*self._wire(name, pieces, maxima.get(name)))
        yield from writer.finish()

    def _owned(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Pieces, bool]]:
        """HF name, this rank's pieces of it (views), and whether it belongs to an expert."""
        at = self.layout.at(self.rank)
        for name, parameter in parameters:
            if not owns(name, at, self.arch):
                continue
            by_tensor: dict[str, Pieces] = {}
            for piece in hf_pieces(name, self.arch, self.layout, at):
                view = parameter[slices(piece.local_box)]
                by_tensor.setdefault(piece.hf_name, []).append((piece.hf_box, view))
            for hf_name, pieces in by_tensor.items():
                yield hf_name, pieces, ".experts." in name

    def _exchange_maxima(self, owned: list[tuple[str, Pieces, bool]]) -> dict[str, torch.Tensor]:
        """Block maxima of tensors whose cut runs through blocks. Collective over the ranks that share them.

        All of it comes before the first send: an engine may listen to one rank while its neighbour waits to send.
        """
        maxima = {}
        for name, pieces, expert in owned:
            if self.table.formats[name] != "bf16" and (group := self._cut_group(self.table.shapes[name], pieces, expert)):
                maxima[name] = block_maxima(self.table.shapes[name], pieces)
                exchange_maxima(maxima[name], group)
        return maxima

    def _wire(self, name: str, pieces: Pieces, amax: torch.Tensor | None) -> list[tuple[str, Box, torch.Tensor]]:
        if self.table.formats[name] == "bf16":
            for _, values in pieces:
                if not torch.isfinite(values).all():
                    raise RefitError(f"{name}: the trainer's weight holds NaN or Inf; the refit is refused")
            return [(name, box, values.to(torch.bfloat16)) for box, values in pieces]
        amax = block_maxima(self.table.shapes[name], pieces) if amax is None else amax
        quantized, scales = quantize_pieces(name, pieces, amax)
        sent = []
        for (box, _), values in zip(pieces, quantized, strict=True):
            sent.append((name, box, values))
            if blocks := owned_blocks(box):
                sent.append((scale_name(name), tuple(blocks), scales[slices(blocks)]))
        return sent

    def _cut_group(self, shape, pieces, expert: bool) -> dist.ProcessGroup | None:
        """The ranks that share blocks of this tensor, if the even cut runs through blocks; the same answer on all."""
        parts = self.layout.etp if expert else self.layout.tp
        covered = [sum(b[d][1] - b[d][0] for b, _ in pieces) for d in range(len(shape))]
        cut = [n for n, whole in zip(covered, shape, strict=True) if n < whole]
        # All ranks hold equal shares, so one share that is not whole blocks means that some cut is not on the grid.
        if parts == 1 or not any(n % BLOCK for n in cut):
            return None
        return self.etp_group if expert else self.tp_group


def send(source: ShardSource, parameters: Iterable[tuple[str, torch.Tensor]], link: GlooLink, engines: list[int], version: int) -> int:
    """Send all buckets of this rank to every engine; returns the payload bytes sent.

    On a failure here every engine is told the reason, so none of them waits, and the error is raised.
    """
    sent = 0
    try:
        for bucket in source.buckets(parameters):
            for engine in engines:
                link.send(engine, version, bucket)
                sent += bucket.payload.numel()
    except Exception as error:
        # Of any kind: engines must not wait for what will not come. It is raised again below.
        for engine in engines:
            with contextlib.suppress(RuntimeError):  # the link itself may be what failed
                link.abort(engine, version, f"trainer rank {source.rank}: {error}")
        raise
    for engine in engines:
        link.end(engine, version)
    return sent
