"""What the installed TensorRT-LLM can do, found by looking at it once: releases differ, and 1.3 has no stable API."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from trt_rl.errors import EngineError

FLOOR = Version("1.3.0rc15")
"""Oldest release that verl has proven in this use; older ones are let through only where a probe finds what is needed."""


@dataclass(frozen=True)
class Features:
    version: str
    sleep: str | None
    """How sleeping is switched on: `sleep_config`, `enable_sleep`, or None."""
    pause_generation: bool
    """`AsyncLLM.pause_generation` and `resume_generation`."""
    target_ranks: bool
    """`AsyncLLM.collective_rpc(target_ranks=...)`."""
    weight_update_hooks: bool
    """`begin_update_weights` and `abort_update_weights` of the model loader, `finalize_weight_update` of the extension."""
    processed_logprobs: bool
    """`SamplingParams.logprobs_mode`: log-probs under the temperature that sampled."""
    fp8_block_refit: bool
    """FP8 block weights can be loaded in parts, as a refit does."""
    control_action: str
    """Module of `control_action_decorator`."""

    @property
    def below_floor(self) -> bool:
        return Version(self.version) < FLOOR


_DECORATOR_HOMES = ("tensorrt_llm.executor.ray.utils", "tensorrt_llm._ray_utils")  # 1.4, and before


def probe() -> Features:
    """Look at the installed package. Imports it.

    Raises:
        EngineError: TensorRT-LLM is not installed or lacks something that the adapter cannot do without.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
        arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args")
        extension = importlib.import_module("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension
        linear = importlib.import_module("tensorrt_llm._torch.modules.linear")
        engine, fields = package.AsyncLLM, arguments.TorchLlmArgs.model_fields
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"TensorRT-LLM with AsyncLLM on Ray cannot be used here: {error}; use an image of release {FLOOR} or newer"
        ) from error
    sleep = next((name for name in ("sleep_config", "enable_sleep") if name in fields), None)
    block = getattr(linear, "FP8BlockScalesLinearMethod", None)
    return Features(
        version=_version(package),
        sleep=sleep,
        pause_generation=hasattr(engine, "pause_generation"),
        target_ranks="target_ranks" in inspect.signature(engine.collective_rpc).parameters,
        weight_update_hooks=hasattr(extension, "finalize_weight_update"),
        processed_logprobs="logprobs_mode" in inspect.signature(package.SamplingParams).parameters,
        fp8_block_refit=block is not None and issubclass(block, linear.UnquantizedLinearMethod),
        control_action=_decorator()[0],
    )


def control_action_decorator(method: Callable) -> Callable:
    """TensorRT-LLM's own decorator: the executor's loop stands still, on every rank, while `method` runs."""
    return _decorator()[1](method)


def _decorator() -> tuple[str, Any]:
    for home in _DECORATOR_HOMES:
        try:
            found = getattr(importlib.import_module(home), "control_action_decorator", None)
        except ModuleNotFoundError:
            continue
        if found is not None:
            return home, found
    raise EngineError(f"TensorRT-LLM has no control_action_decorator in {' or '.join(_DECORATOR_HOMES)}; use release {FLOOR} or newer")


def _version(package: Any) -> str:
    return getattr(package, "__version__", None) or importlib.metadata.version("tensorrt_llm")
