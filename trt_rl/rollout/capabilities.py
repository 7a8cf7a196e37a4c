"""What each engine can do, declared where the plan can read it without importing an engine. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PauseMode = Literal["drain", "abort", "keep"]


@dataclass(frozen=True)
class Capabilities:
    formats: tuple[str, ...]
    """Of weights that a refit may bring."""
    pause_modes: tuple[PauseMode, ...]
    sleep: bool
    parallel: bool
    """Whether one replica may have several ranks (`rollout.parallel`)."""
    fused: bool
    """Whether q/k/v and gate/up are one tensor, so that FP8 blocks must end where these end."""
    places_workers: bool = False
    """Whether the engine starts a Ray worker for every rank in bundles that it is given, on any node; if not, its actor
    holds the GPUs of one replica, all on one node."""
    whole_tensors: bool = False
    """Whether every rank loads whole tensors and cuts them itself, so that a refit brings them whole."""
    any_ep: bool = True
    """Whether `rollout.parallel.ep` may be any divisor of tp; if not, experts are divided over all ranks or over none."""
    duplicates_scales: bool = True
    """Whether FP8 blocks of KV heads can be repeated on ranks, where there are fewer heads than ranks, in dense models."""


_ALL_PAUSES: tuple[PauseMode, ...] = ("drain", "abort", "keep")
CAPABILITIES = {
    "trtllm": Capabilities(
        ("bf16", "fp8_block"),
        _ALL_PAUSES,
        sleep=True,
        parallel=True,
        fused=True,
        places_workers=True,
        whole_tensors=True,
        duplicates_scales=False,
    ),
    "vllm": Capabilities(("bf16", "fp8_block"), _ALL_PAUSES, sleep=True, parallel=True, fused=True, any_ep=False),
    "sglang": Capabilities(("bf16", "fp8_block"), ("drain", "abort"), sleep=True, parallel=True, fused=True, any_ep=False),
    "hf": Capabilities(("bf16", "fp8_block", "fp8_per_tensor"), _ALL_PAUSES, sleep=False, parallel=False, fused=False),
}
