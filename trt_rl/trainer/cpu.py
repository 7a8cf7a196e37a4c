"""Megatron-core 0.16.1 without a GPU: every stand-in that training over gloo needs, installed in one call.

Megatron-core is written for CUDA. With the replacements below its real tensor, pipeline and expert
parallelism, distributed optimizer and checkpointing run on any machine. `install()` must be called
before anything imports megatron (ModelOpt imports it too) and refuses to run where CUDA is present.

| obstacle in megatron-core                                     | stand-in                                         |
| ------------------------------------------------------------- | ------------------------------------------------ |
| `torch.cuda.current_device()` and friends                     | the device `cpu`; synchronize does nothing       |
| streams and events                                            | inert objects                                    |
| RNG tracker reads and writes the CUDA generator               | the CPU generator                                |
| factories called with a literal `device="cuda"`               | `cuda` means `cpu` in torch's factory functions  |
| optimizers accept `torch.cuda.*Tensor` only (`Tensor.type()`) | the name carries the `torch.cuda.` prefix        |
| `Tensor.cuda()`                                               | the tensor itself                                |
| `torch.compile` behind `jit_fuser`                            | no compilation                                   |
| `moe_utils.te_general_gemm` undefined without TE              | `None`                                           |
| MoE all-to-all split sizes stay tensors                       | numpy when numpy was asked for                   |
| gloo gathers and scatters equal sizes only (MoE with etp > 1) | pad, or reduce whole and keep the own part      |
| torch's Adam keeps `step` per parameter, checkpoints per group | `GroupStepAdam`                                 |
| BF16 matrix products are 50x slower than FP32 without AVX-512 | FP32 product, rounded once (`trt_rl.cpu_gemm`)   |
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings

import torch
import torch.distributed as dist

from trt_rl import cpu_gemm

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "empty_like", "zeros_like", "ones_like")
_CPU = torch.device("cpu")
_installed = False


class _InertStream:
    """Stands for `torch.cuda.Stream` and `torch.cuda.Event`: work on a CPU is already in order."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        return None

    def record_event(self, event=None):
        return event or self

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self, stream=None) -> None:
        pass

    def wait(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        return True


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW whose `step` counter belongs to the parameter group, as in Apex and Transformer Engine.

    Megatron's distributed optimizer saves and restores exactly that layout (`exp_avg`, `exp_avg_sq` per
    parameter, `step` per group). Decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **_fused_options) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correct1 = 1 - beta1 ** group["step"]
            correct2 = 1 - beta2 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                denominator = (state["exp_avg_sq"] / correct2).sqrt_().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correct1)


def install_without_cuda() -> None:
    """`install` where there is no CUDA; nothing where there is."""
    if not torch.cuda.is_available():
        install()


def install() -> None:
    """Put every stand-in in place. Calling it twice does no harm.

    Raises:
        RuntimeError: CUDA is present, or megatron was imported before.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("CPU stand-ins for megatron-core must not be installed on a machine with CUDA")
    if any(name.startswith("megatron") for name in sys.modules):
        raise RuntimeError("CPU stand-ins must be installed before megatron (or modelopt) is imported")
    _installed = True
    _replace_cuda()
    _replace_tensor_methods()
    for name in _FACTORIES:
        setattr(torch, name, _cuda_means_cpu(getattr(torch, name)))
    cpu_gemm.install()
    _allow_uneven_collectives()
    _patch_megatron()


def _replace_cuda() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = cuda.default_stream = lambda device=None: _InertStream()
    cuda.Stream = cuda.Event = _InertStream
    cuda.stream = lambda stream: stream if stream is not None else _InertStream()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    # Seeding "the GPU" must not disturb the CPU generator for good: the tracker saves and restores around it.
    cuda.manual_seed = torch.manual_seed


def _replace_tensor_methods() -> None:
    type_of = torch.Tensor.type

    def type_named_cuda(self, dtype=None, *args, **kwargs):
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        return type_of(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_named_cuda
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None


def _cuda_means_cpu(factory):
    @functools.wraps(factory)
    def make(*args, device=None, **kwargs):
        if device is not None and torch.device(device).type == "cuda":
            device = _CPU
        return factory(*args, device=device, **kwargs)

    return make


def _patch_megatron() -> None:
    # megatron.core.jit takes `torch.compile` as its fuser while it is imported, and decorates at import time.
    compiler, torch.compile = torch.compile, _leave_uncompiled
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
            import megatron.core.optimizer as optimizer
            import megatron.core.tensor_parallel.random as rng
            from megatron.core.models.gpt import gpt_model  # noqa: F401  imports every module that uses the fuser
            from megatron.core.optimizer import distrib_optimizer
            from megatron.core.transformer.moe import moe_utils, token_dispatcher
    finally:
        torch.compile = compiler

    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True  # as far as `step` goes
    # It warns whenever the CPU generator moves inside a "GPU" region; here they are one generator.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None

    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _allow_uneven_collectives() -> None:
    even_gather, even_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts, tensor, group=None, async_op=False):
        sizes = [p.shape[0] if p.dim() else 1 for p in parts]
        if len(set(sizes)) <= 1:
            return even_gather(parts, tensor, group=group, async_op=async_op)
        padded = [p.new_empty((max(sizes), *p.shape[1:])) for p in parts]
        mine = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        mine[: tensor.shape[0]] = tensor
        even_gather(padded, mine, group=group)
        for part, wide in zip(parts, padded, strict=True):
            part.copy_(wide[: part.shape[0]])

    def reduce_scatter(output, parts, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({p.shape for p in parts}) <= 1:
            return even_scatter(output, parts, op=op, group=group, async_op=async_op)
        whole = torch.cat(list(parts))
        dist.all_reduce(whole, op=op, group=group)
        start = sum(p.shape[0] for p in parts[: dist.get_rank(group)])
        output.copy_(whole[start : start + output.shape[0]])

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _leave_uncompiled(function=None, **options):
    return function if function is not None else (lambda f: f)
