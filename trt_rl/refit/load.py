"""The engine's side of a refit: a transaction that writes slices into live tensors and proves they are all there."""

from __future__ import annotations

import torch

from trt_rl.errors import RefitError
from trt_rl.refit.bucket import Bucket, as_bytes, digest
from trt_rl.refit.names import Box, slices


class Loader:
    """Writes buckets of one version into `targets`, the engine's live tensors by HF name (FP8 scales included).

    `finish` accepts only if every value of every target was written exactly once.
    """

    def __init__(self, targets: dict[str, torch.Tensor], version: int) -> None:
        self.targets, self.version, self.bytes = targets, version, 0
        self._written: dict[str, list[Box]] = {}

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Write one bucket.

        Raises:
            RefitError: a slice is unknown, has another dtype, lies outside its tensor, overlaps what was
                written, or reads back from the live tensor with other bits.
        """
        for entry, values in bucket.tensors():
            target = self.targets.get(entry.name)
            if target is None:
                raise RefitError(f"{entry.name}: the engine has no such tensor")
            if values.dtype != target.dtype:
                raise RefitError(f"{entry.name}: the engine holds {target.dtype}, the trainer sent {values.dtype}")
            if len(entry.box) != target.dim() or any(not 0 <= a < b <= n for (a, b), n in zip(entry.box, target.shape, strict=False)):
                raise RefitError(f"{entry.name}: slice {list(entry.box)} is outside the engine's {list(target.shape)}")
            seen = self._written.setdefault(entry.name, [])
            if any(_overlap(entry.box, other) for other in seen):
                raise RefitError(f"{entry.name}: slice {list(entry.box)} was sent twice")
            seen.append(entry.box)
            live = target[slices(entry.box)]
            live.copy_(values)
            if digest(as_bytes(live)) != entry.digest:
                raise RefitError(f"{entry.name}{list(entry.box)}: the engine's tensor does not hold what was sent")
            self.bytes += entry.nbytes

    def finish(self) -> None:
        """Raises:
        RefitError: a tensor, or part of one, never arrived.
        """
        for name, target in self.targets.items():
            written = sum(_volume(box) for box in self._written.get(name, []))
            if written != target.numel():
                raise RefitError(f"{name}: {written} of {target.numel()} values arrived for version {self.version}")


def _volume(box: Box) -> int:
    total = 1
    for start, stop in box:
        total *= stop - start
    return total


def _overlap(a: Box, b: Box) -> bool:
    return all(a0 < b1 and b0 < a1 for (a0, a1), (b0, b1) in zip(a, b, strict=True))
