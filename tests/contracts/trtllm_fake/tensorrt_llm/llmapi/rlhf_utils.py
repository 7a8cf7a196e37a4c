"""`tensorrt_llm.llmapi.rlhf_utils`: the extension whose methods `collective_rpc` reaches on every worker."""

from __future__ import annotations

import base64
from typing import Any

import torch

from tensorrt_llm import _family
from tensorrt_llm._fake_control import control_action_decorator
from tensorrt_llm._fake_pickle import loads
from tensorrt_llm._torch.utils import get_device_uuid


class WorkerExtension:
    @control_action_decorator
    def update_weights(self, ipc_handles: dict | None = None) -> None:
        """One bucket of HF-named tensors for this device, or None to finalise."""
        engine = self.engine.model_engine
        try:
            _update(self, engine, ipc_handles)
        except Exception:
            if _family.LIFECYCLE:
                engine.model_loader.abort_update_weights()
                if hasattr(engine.model, "first_pre_reload_weights"):
                    del engine.model.first_pre_reload_weights
            raise

    def check_weights_updated(self) -> bool:
        """Whether all parameters are zero; a hook of the package's own tests."""
        return all(torch.allclose(p.float(), torch.zeros(())) for _, p in self.engine.model_engine.model.named_parameters())

    def start_profile(self) -> None: ...

    def stop_profile(self) -> None: ...

    if _family.LIFECYCLE:

        def finalize_weight_update(self) -> None:
            """The undecorated end of a refit, for extensions with a commit of their own."""
            self.engine.model_engine.model_loader.finalize_update_weights()
            _finalize(self.engine.model_engine.model)

    if _family.NEW_LAYOUT:

        @control_action_decorator
        def reset_prefix_cache(self) -> None:
            self.engine.reset_prefix_cache()

    elif _family.EXTENSION_RESETS_CACHE:

        def reset_prefix_cache(self) -> None:
            self.engine.reset_prefix_cache()

    if _family.PAUSE:

        @control_action_decorator
        def wait_for_engine_idle(self) -> None:
            """Returns once nothing runs."""


def _update(self: Any, engine: Any, ipc_handles: dict | None) -> None:
    if not hasattr(engine.model, "first_pre_reload_weights"):
        if _family.LIFECYCLE:
            engine.model_loader.begin_update_weights()
        for module in _live(engine.model, "pre_reload_weights"):
            module.pre_reload_weights()
        engine.model.first_pre_reload_weights = True
    if ipc_handles is not None:
        weights = _rebuild(ipc_handles, self.device_id)
        engine.model_loader.reload(engine.model, weights, allow_partial_loading=True)
        return
    if _family.LIFECYCLE:
        self.finalize_weight_update()
    else:
        _finalize(engine.model)
    self.engine.reset_prefix_cache()
    del engine.model.first_pre_reload_weights


def _finalize(model: torch.nn.Module) -> None:
    for module in model.modules():
        if not getattr(module, "_weights_removed", False):
            for step in ("process_weights_after_loading", "post_load_weights"):
                if hasattr(module, step):
                    getattr(module, step)()


def _live(model: torch.nn.Module, method: str) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, method) and not getattr(m, "_weights_removed", False)]


def _rebuild(ipc_handles: dict, device_id: int) -> dict[str, torch.Tensor]:
    uuid = get_device_uuid(device_id)
    if uuid not in ipc_handles:
        raise ValueError(f"Device UUID {uuid} not found in ipc_handles")
    handles: Any = ipc_handles[uuid]
    if isinstance(handles, str):
        # CUDA handles need no bytes; tensors of a CPU travel as bytes unless they are shared by file name.
        handles = loads(base64.b64decode(handles), disallowed_imports={"torch.storage": []})
        if not isinstance(handles, list):
            raise ValueError(f"Deserialized data must be a list, got {type(handles).__name__} instead")
    weights = {}
    for name, (function, arguments) in handles:
        arguments = list(arguments)
        if function.__name__.lstrip("_").startswith("rebuild_tensor"):  # of a CPU tensor: no device among its arguments
            weights[name] = function(*arguments)
            continue
        arguments[6] = device_id
        weights[name] = function(*arguments)
    return weights
