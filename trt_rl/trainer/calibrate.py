"""Calibrate the inputs of linear layers for `fp8_per_tensor`: ModelOpt's max calibrator on the trainer's own forward passes.

`mtq.quantize` would rewrite Megatron's modules in place, which are to be trained afterwards; its calibrator is attached
by forward hooks instead, and nothing of it stays. Experts of a layer share one input scale for gate and up and one for
down, the largest over all experts and ranks (ModelOpt's `sync_moe_local_experts_amax` does the same; engines keep one). Padding is part of what a layer sees and counts too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import Layout
from trt_rl.refit.names import hf_pieces
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.quantize import scales_of

_LINEAR = re.compile(r".*\.(linear_qkv|linear_proj|linear_fc1|linear_fc2)")


def calibrate(
    module: torch.nn.Module, arch: Arch, layout: Layout, table: PrecisionTable, rms_eps: float, forward: Callable[[], None]
) -> dict[str, float]:
    """Run `forward` and return the input scale of every fp8_per_tensor weight of the model, by HF name. Collective.

    Args:
        forward: forward passes over calibration samples, on all ranks together.

    Raises:
        RefitError: a linear layer saw no input.
    """
    from modelopt.torch.quantization.calib import MaxCalibrator

    at, calibrators, hooks = layout.at(dist.get_rank()), {}, []
    for name, linear in module.named_modules():
        if _LINEAR.fullmatch(name):
            calibrators[name] = MaxCalibrator(num_bits=(4, 3), axis=None, unsigned=False)
            hooks.append(linear.register_forward_pre_hook(_collector(calibrators[name], linear, rms_eps)))
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    slots = {key: i for i, key in enumerate(sorted({_slot(n) for n in table.formats if table.formats[n] == "fp8_per_tensor"}))}
    amax = torch.zeros(len(slots), device=next(module.parameters()).device)
    for name, _ in module.named_parameters():
        owner = re.sub(r"\.weight\d*$", "", name)
        if owner not in calibrators or calibrators[owner].compute_amax() is None:
            continue
        for piece in hf_pieces(name, arch, layout, at):
            if (slot := slots.get(_slot(piece.hf_name))) is not None:
                amax[slot] = torch.maximum(amax[slot], calibrators[owner].compute_amax().float().max())
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    silent = [key for key, i in slots.items() if not amax[i] > 0]
    if silent:
        raise RefitError(f"{silent[0]}: no calibration sample reached this layer; raise refit.calibration_prompts")
    scales = scales_of(amax).tolist()
    return {name: scales[slots[_slot(name)]] for name, format in table.formats.items() if format == "fp8_per_tensor"}


def _collector(calibrator, linear: torch.nn.Module, rms_eps: float):
    def collect(_, inputs) -> None:
        x = inputs[0].detach()
        if x.numel() == 0:
            return  # an expert without tokens
        fused_norm = getattr(linear, "layer_norm_weight", None)
        if fused_norm is not None:  # Transformer Engine normalizes inside the layer; the product's input is what counts
            x = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], fused_norm.detach().float(), rms_eps)
        calibrator.collect(x)

    return collect


def _slot(name: str) -> str:
    """Weights with one slot share an input, or a scale of it: q, k and v; gate and up; all experts of a layer."""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    return re.sub(r"\.(k|v)_proj", ".q_proj", name).replace(".up_proj", ".gate_proj")
