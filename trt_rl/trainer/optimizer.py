"""Megatron's data-parallel wrapper, distributed optimizer and learning-rate schedule for one model."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trt_rl.config import OptimizerSettings


def wrap(model: torch.nn.Module, overlap: bool) -> DistributedDataParallel:
    """`model` with contiguous FP32 gradient buffers, sharded for the distributed optimizer."""
    config = model.config
    # No Float16Module: parameters are BF16 already, and it would widen the logits to FP32 all at once.
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=False,  # it would leave parameters stale until the next forward pass, and a refit reads them before
        use_distributed_optimizer=True,
        check_for_nan_in_grad=True,
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = wrapped.no_sync
    return wrapped


def make_optimizer(model: DistributedDataParallel, settings: OptimizerSettings, bf16: bool) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model])
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def make_schedule(optimizer: MegatronOptimizer, settings: OptimizerSettings, total_updates: int) -> OptimizerParamScheduler:
    """Warm-up from zero, then `settings.decay` to `min_lr` over the run. Counted in optimizer updates."""
    decay_updates = max(settings.decay_steps or total_updates, settings.warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=decay_updates,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay_updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # the recipe decides, also after a resume
        override_opt_param_scheduler=True,
    )
