"""Fake only: which release is imitated, and what that release has. Chosen by TRTLLM_FAKE_VERSION."""

from __future__ import annotations

import os

VERSIONS = ("1.2.1", "1.3.0rc15", "1.3.0rc29", "1.4.0rc1")
VERSION = os.environ.get("TRTLLM_FAKE_VERSION", "1.3.0rc15")
if VERSION not in VERSIONS:
    raise ImportError(f"TRTLLM_FAKE_VERSION={VERSION!r} is none of {', '.join(VERSIONS)}")
_at = VERSIONS.index(VERSION)

SLEEP_CONFIG = _at >= 1  # else enable_sleep; also the *_weights tags and FP8 partial loading
LOGPROBS_MODE = _at >= 1
FP8_PARTIAL = _at >= 1
TARGET_RANKS = _at >= 1
PAUSE = _at >= 1
DRAIN_ARGUMENT = _at >= 1
EXTENSION_RESETS_CACHE = _at >= 1
COPIES_NODE_LOCAL_VARS = _at == 0
LIFECYCLE = _at >= 2  # begin/finalize/abort_update_weights
REQUEST_SEED = _at >= 2  # TorchSampler heeds SamplingParams.seed (PR #17172); before, all requests draw from one generator
FORCES_NCCL = _at <= 2
NEW_LAYOUT = _at >= 3  # tensorrt_llm.executor.ray.* and llmapi.serialization
MEMORY_STATUS = _at >= 3
REENTRANCY_GUARD = _at >= 3


def only_in(module: str, present: bool) -> None:
    """For modules that some releases have elsewhere: importing them is the error that the real package gives."""
    if not present:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)


def knob(name: str, default: str = "") -> str:
    return os.environ.get(f"TRTLLM_FAKE_{name}", default)
