"""A bucket: many slices of tensors in one contiguous byte buffer, with a manifest that says what they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import xxhash

from trt_rl.errors import RefitError
from trt_rl.refit.names import Box

_ALIGN = 16  # bytes; every slice starts on a boundary that suits any dtype


@dataclass(frozen=True)
class Entry:
    """`payload[offset : offset + nbytes]` is `name[box]`, row by row, in `dtype`."""

    name: str
    dtype: str
    box: Box
    offset: int
    nbytes: int
    digest: int  # xxh3-64 of the bytes


@dataclass(frozen=True)
class Bucket:
    entries: list[Entry]
    payload: torch.Tensor  # uint8, on the CPU or a GPU

    def manifest(self) -> bytes:
        return json.dumps([asdict(e) for e in self.entries]).encode()

    @classmethod
    def from_wire(cls, manifest: bytes, payload: torch.Tensor) -> Bucket:
        entries = [Entry(**{**e, "box": tuple(map(tuple, e["box"]))}) for e in json.loads(manifest)]
        return cls(entries, payload)

    def tensors(self) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Each slice as a tensor of its own dtype and shape, viewing the payload.

        Raises:
            RefitError: the bytes of a slice are not those the sender digested.
        """
        for entry in self.entries:
            raw = self.payload[entry.offset : entry.offset + entry.nbytes]
            if digest(raw) != entry.digest:
                raise RefitError(f"{entry.name}{list(entry.box)}: the bytes that arrived are not those that were sent")
            shape = [stop - start for start, stop in entry.box]
            yield entry, raw.view(getattr(torch, entry.dtype)).view(shape)


class BucketWriter:
    """Packs slices into buckets of about `capacity` bytes; a slice larger than that gets a bucket of its own."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pending: list[tuple[str, Box, torch.Tensor]] = []
        self._filled = 0

    def add(self, *group: tuple[str, Box, torch.Tensor]) -> Iterator[Bucket]:
        """Add slices that must travel together (a weight and its scales); yields a bucket when one is full."""
        size = sum(_padded(t) for _, _, t in group)
        if self._pending and self._filled + size > self.capacity:
            yield self._pack()
        self._pending.extend(group)
        self._filled += size

    def finish(self) -> Iterator[Bucket]:
        if self._pending:
            yield self._pack()

    def _pack(self) -> Bucket:
        payload = torch.empty(self._filled, dtype=torch.uint8, device=self._pending[0][2].device)
        entries, offset = [], 0
        for name, box, tensor in self._pending:
            raw = as_bytes(tensor)
            payload[offset : offset + raw.numel()] = raw
            entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), box, offset, raw.numel(), digest(raw)))
            offset += _padded(tensor)
        self._pending, self._filled = [], 0
        return Bucket(entries, payload)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def digest(raw: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(raw.cpu().numpy())


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
