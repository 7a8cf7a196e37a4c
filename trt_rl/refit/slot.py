"""A bucket in memory: one contiguous uint8 buffer that holds slices, their digests and a header, as its plan says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_rl.refit.digest import digest
from trt_rl.refit.route import HEADER_BYTES, BucketPlan, Slice


@dataclass(frozen=True)
class Slot:
    """`buffer` seen as bucket `plan`. The buffer may be larger, and on any device."""

    plan: BucketPlan
    buffer: torch.Tensor

    @property
    def payload(self) -> torch.Tensor:
        """Everything that travels."""
        return self.buffer[: self.plan.nbytes]

    @property
    def digests(self) -> torch.Tensor:
        """int64, one a slice."""
        return self.buffer[self.plan.data_bytes : self.plan.nbytes - HEADER_BYTES].view(torch.int64)

    @property
    def header(self) -> torch.Tensor:
        """int64: version, bucket number, route digest, 0."""
        return self.buffer[self.plan.nbytes - HEADER_BYTES : self.plan.nbytes].view(torch.int64)

    def raw(self, part: Slice) -> torch.Tensor:
        return self.buffer[part.offset : part.offset + part.nbytes]

    def tensor(self, part: Slice) -> torch.Tensor:
        """A slice as a tensor of its own dtype and shape, viewing the buffer."""
        return self.raw(part).view(getattr(torch, part.dtype)).view([stop - start for start, stop in part.box])

    def write_header(self, version: int, route_digest: int) -> None:
        for word, value in zip(self.header, (version, self.plan.number, route_digest, 0), strict=True):
            word.fill_(value)  # where a copy from the host would wait for the GPU


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def write_digests(slot: Slot) -> None:
    """Digest every slice of a slot on the CPU."""
    slot.digests.copy_(torch.tensor([digest(slot.raw(part)) for part in slot.plan.slices], dtype=torch.int64))
