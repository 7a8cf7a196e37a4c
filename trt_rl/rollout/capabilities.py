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


CAPABILITIES = {
    "hf": Capabilities(("bf16", "fp8_block", "fp8_per_tensor"), ("drain", "abort", "keep"), sleep=False, parallel=False, fused=False),
    "vllm": Capabilities(("bf16", "fp8_block"), ("drain", "abort", "keep"), sleep=False, parallel=False, fused=True),
}
