"""What a refit adds to TensorRT-LLM's workers: buckets are received inside the worker and given to its own loader.

Loaded into every worker by `ray_worker_extension_cls`; imports tensorrt_llm. TensorRT-LLM's loader takes whole Hugging
Face tensors and cuts them itself, so every worker receives whole tensors (a node receives each byte once and passes it
on), joins them and calls `model_loader.reload(..., allow_partial_loading=True)`. The order of calls is that of
tensorrt_llm/llmapi/rlhf_utils.py `WorkerExtension.update_weights`, whose `update_weights(None)` ends the update.

Methods run in the worker's main thread and answer `{"failure": reason}` instead of raising: of several ranks that
raise, TensorRT-LLM's `collective_rpc` would tell of one only. No method calls another decorated one: control actions
do not nest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.member import Agreement, EngineMember
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.staging import LiveCheck, Staging
from trt_rl.refit.stream import Refit
from trt_rl.rollout.trtllm_features import control_action_decorator
from trt_rl.rollout.trtllm_live import live_places

_LATCH = "first_pre_reload_weights"  # TensorRT-LLM's own mark of an update that has begun
_LOADER_ERRORS = (AssertionError, AttributeError, KeyError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def _answers(method: Callable) -> Callable:
    """Give a RefitError as an answer, so that the adapter hears of every rank."""

    @wraps(method)
    def call(self, *args: Any) -> dict[str, Any]:
        try:
            return method(self, *args) or {}
        except RefitError as error:
            return {"failure": str(error)}

    return call


class RefitExtension(WorkerExtension):
    """Methods that TensorRT-LLM's workers get. Names carry a prefix: it refuses one that a worker has already."""

    @_answers
    def trt_rl_agree(self, agreement: str, policy: str, folder: str, tp: int, ep: int, first_rank: int) -> dict[str, Any]:
        """Build this worker's side; answers the digest of its precision table and route."""
        agreed, arch = Agreement.from_json(agreement), Arch.load(folder)
        table = PrecisionTable.build(arch, PrecisionPolicy.from_dict(json.loads(policy)))
        if getattr(_model_engine(self), "moe_load_balancer", None) is not None:
            raise RefitError("moe_config.load_balancer moves experts between ranks; a refit into such an engine is refused, turn it off")
        rank = first_rank + self.rank
        on_gpu = agreed.on_gpu and torch.cuda.is_available()
        device = torch.device("cuda", self.device_id) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        live = live_places(dict(_model_engine(self).model.named_parameters()), arch, table, EngineLayout(tp, ep), self.rank)
        check = LiveCheck(live, agreed.label(rank))
        staging = Staging(arch, table, agreed.engine, rank, device, lambda tensors: _reload(self, tensors), agreed.bucket_bytes)
        staging.label = agreed.label(rank)
        self._trt_rl = _State(EngineMember(agreed, arch, table, staging), staging, check, table.format)
        return {"digest": self._trt_rl.member.digest}

    @_answers
    def trt_rl_join(self) -> None:
        self._trt_rl.member.join()

    @_answers
    def trt_rl_prepare(self) -> None:
        self._trt_rl.member.prepare()

    @control_action_decorator
    @_answers
    def trt_rl_receive(self, version: int, verify: str, full: bool) -> dict[str, Any]:
        """Receive every bucket and load it. The engine's own `update_weights(None)` follows, then `trt_rl_verify`."""
        state, refit = self._trt_rl, Refit(version, verify, full)
        if verify != "off" and state.format != "bf16" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10:
            raise RefitError(
                "on this GPU TensorRT-LLM lays FP8 weights out anew after loading, so that live tensors cannot be compared with "
                "what was sent; set refit.verify = off (buckets and loader are then trusted)"
            )
        state.staging.reset()
        state.check.expected = {}
        state.verifies = verify != "off"
        _begin(self)
        try:
            report = state.member.receive(refit)
        except BaseException:
            _abort(self)
            raise
        return report.as_dict() | {"staging_bytes": state.staging.peak_bytes}

    @_answers
    def trt_rl_verify(self) -> dict[str, Any]:
        """Compare live tensors with what the loader was given; answers how many."""
        state = self._trt_rl
        return {"live_tensors": state.check.compare() if state.verifies else 0}

    @_answers
    def trt_rl_abort(self) -> None:
        """End an update that failed on some rank. The weights are of no version after it."""
        _abort(self)

    @control_action_decorator
    @_answers
    def trt_rl_reset_prefix_cache(self) -> None:
        """Drop blocks of earlier prompts. The engine's own method: the extension's came later than 1.2."""
        if not hasattr(self.engine, "reset_prefix_cache"):
            raise RefitError(
                "this TensorRT-LLM cannot reset its prefix cache; set rollout.trtllm.kv_cache_config.enable_block_reuse = false"
            )
        self.engine.reset_prefix_cache()

    @_answers
    def trt_rl_disconnect(self) -> None:
        state = getattr(self, "_trt_rl", None)
        if state is not None:
            state.member.close()
            self._trt_rl = None

    def trt_rl_alive(self) -> int:
        return self.rank


class _State:
    """What a worker keeps between the calls of one refit group."""

    def __init__(self, member: EngineMember, staging: Staging, check: LiveCheck, format: str) -> None:
        self.member, self.staging, self.check, self.format = member, staging, check, format
        self.verifies = False


def _model_engine(worker: Any) -> Any:
    return worker.engine.model_engine


def _begin(worker: Any) -> None:
    """What TensorRT-LLM does before the first bucket of an update."""
    engine = _model_engine(worker)
    if hasattr(engine.model, _LATCH):
        return
    if hasattr(engine.model_loader, "begin_update_weights"):
        engine.model_loader.begin_update_weights()
    for module in engine.model.modules():
        if hasattr(module, "pre_reload_weights") and not getattr(module, "_weights_removed", False):
            module.pre_reload_weights()
    setattr(engine.model, _LATCH, True)


def _abort(worker: Any) -> None:
    engine = _model_engine(worker)
    if hasattr(engine.model_loader, "abort_update_weights"):
        engine.model_loader.abort_update_weights()
    if hasattr(engine.model, _LATCH):
        delattr(engine.model, _LATCH)


def _reload(worker: Any, tensors: dict[str, torch.Tensor]) -> None:
    engine, state = _model_engine(worker), worker._trt_rl
    if state.verifies:
        state.check.given(tensors)
    try:
        engine.model_loader.reload(engine.model, tensors, allow_partial_loading=True)
    except _LOADER_ERRORS as error:
        first = next(iter(tensors))
        raise RefitError(
            f"TensorRT-LLM's loader of {state.staging.label} refused {len(tensors)} tensors from {first} on: {type(error).__name__}: {error}"
        ) from error
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the loader may copy from tensors that staging frees now
