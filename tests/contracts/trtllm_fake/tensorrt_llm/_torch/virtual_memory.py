"""`tensorrt_llm._torch.virtual_memory`: memory by tag that is released and materialised in place.

Released tensors keep their addresses; touching them is an illegal access. What is not restored comes back as garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tensorrt_llm import _family

if not _family.NEW_LAYOUT:
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType

    __all__ = ["ExecutorMemoryType"]


class _Manager:
    def __init__(self) -> None:
        self.sources: dict[str, tuple[Callable[[], Iterable[torch.Tensor]], str]] = {}
        self.released: dict[str, list[torch.Tensor] | None] = {}

    def add(self, tag: str, tensors: Callable[[], Iterable[torch.Tensor]], mode: str) -> None:
        self.sources[tag] = (tensors, mode)

    def release(self, tag: str) -> int:
        if tag not in self.sources or tag in self.released:
            return 0
        tensors, mode = self.sources[tag]
        blobs = list(tensors())
        self.released[tag] = [t.detach().clone() for t in blobs] if mode in ("CPU", "PINNED") else None
        for tensor in blobs:
            _garbage(tensor, zero=mode == "MEMSET")
        return len(blobs)

    def materialize(self, tag: str) -> int:
        if tag not in self.released:
            return 0
        saved, blobs = self.released.pop(tag), list(self.sources[tag][0]())
        for tensor, old in zip(blobs, saved or (), strict=False):
            tensor.copy_(old)
        return len(blobs)

    def require(self, *tags: str) -> None:
        if gone := sorted(set(tags) & self.released.keys()):
            raise RuntimeError(f"CUDA error: an illegal memory access was encountered (released: {', '.join(gone)})")

    def status(self) -> dict:
        return {"state": "parked" if self.released else "running", "parked_tags": sorted(self.released)}


def _garbage(tensor: torch.Tensor, zero: bool) -> None:
    if zero:
        tensor.zero_()
    elif getattr(tensor, "_kv", False):
        tensor.fill_(-7.5)  # finite: a masked position times NaN would spoil sound sequences
    else:
        tensor.copy_(torch.full((), torch.nan).expand(tensor.shape))


manager = _Manager()


def release_with_tag(*tags: str) -> int:
    return sum(manager.release(str(getattr(t, "value", t))) for t in tags)


def materialize_with_tag(*tags: str) -> int:
    return sum(manager.materialize(str(getattr(t, "value", t))) for t in tags)


def verify_sleep_wakeup_tags(tags: list[str]) -> list:
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType

    for tag in tags:
        if tag not in {m.value for m in ExecutorMemoryType}:
            raise ValueError(f"Unknown memory tag: {tag}")
    return [ExecutorMemoryType(tag) for tag in tags]
