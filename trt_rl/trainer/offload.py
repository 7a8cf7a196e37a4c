"""Gradients and optimizer states in host memory while an engine generates on the trainer's GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


class Offload:
    """Between `out` and `back` the rank holds its weights on the GPU and little else; both may be called twice.

    Gradient buffers are given up and come back as zeros. Optimizer states (the FP32 weights too, where they are not the
    weights themselves) become tensors of pinned host memory under the same names, so that a checkpoint can be written
    while they are away. The host memory is taken once and kept.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: MegatronOptimizer, what: Collection[str]) -> None:
        self.model, self.optimizer, self.what = model, optimizer, what
        self.is_out = False
        self._host: dict[torch.Tensor, torch.Tensor] = {}
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def out(self) -> None:
        if self.is_out or not self.what:
            return
        self.is_out = True
        self.optimizer.zero_grad()  # the optimizer's gradients are views of the buffers
        if "gradients" in self.what:
            self.model.offload_grad_buffers(synchronize=False, empty_cache=False)
        if "optimizer" in self.what:
            self._host = {state: self._to_host(state) for state in self._states()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def back(self) -> None:
        if not self.is_out:
            return
        self.is_out = False
        if "gradients" in self.what:
            self.model.restore_grad_buffers(synchronize=False)
        for state, host in self._host.items():
            state.data = torch.empty_like(host, device=self.device)
            state.data.copy_(host, non_blocking=True)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def host_bytes(self) -> int:
        return sum(host.nbytes for host in self._host.values())

    def _to_host(self, state: torch.Tensor) -> torch.Tensor:
        host = self._host.get(state)
        if host is None:
            host = torch.empty_like(state, device="cpu", pin_memory=state.is_cuda)
        host.copy_(state.data, non_blocking=True)
        state.data = host
        return host

    def _states(self) -> Iterator[torch.Tensor]:
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if part.optimizer is None:  # this rank holds none of its parameters
                continue
            for group in part.optimizer.param_groups:
                yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in self._weights)
            for states in part.optimizer.state.values():
                yield from (s for s in states.values() if isinstance(s, torch.Tensor) and s.device == self.device)
