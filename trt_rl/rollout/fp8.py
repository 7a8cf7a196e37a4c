"""FP8 layers in plain PyTorch: the numerics of an engine's FP8 products, on any device.

Block: weights are e4m3 with one FP32 scale per 128x128 block; activations are quantized on the fly, one scale per row
and 128 columns. Per tensor: one FP32 scale a weight, and one calibrated scale for the layer's input. Products
accumulate in FP32.
"""

from __future__ import annotations

import torch
from torch import nn

from trt_rl.refit.precision import BLOCK, grid

_E4M3_MAX = 448.0


def quantize_activations(x: torch.Tensor) -> torch.Tensor:
    """Round `x [..., K]` to e4m3 with a scale per 128 columns of each row; returned widened to FP32."""
    width = x.shape[-1]
    short = -width % BLOCK
    padded = nn.functional.pad(x.float(), (0, short)) if short else x.float()
    blocks = padded.unflatten(-1, (-1, BLOCK))
    # By a tensor, not a number: see refit/quantize.py.
    scale = (blocks.abs().amax(-1, keepdim=True) / torch.tensor(_E4M3_MAX, device=x.device)).clamp(min=1e-10)
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[..., :width]


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`weight [..., N, K]` in e4m3 times its block scales `[..., ceil(N/128), ceil(K/128)]`, in FP32."""
    rows, columns = weight.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return weight.float() * wide


class BlockFP8Linear(nn.Module):
    """A bias-free linear layer that holds e4m3 values and block scales, nothing wider."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.zeros(grid(shape)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (quantize_activations(x) @ dequantize(self.weight, self.weight_scale_inv).T).to(x.dtype)


class BlockFP8Experts(nn.Module):
    """The experts of one Qwen3-MoE layer, each with its own gate, up and down projections and scales.

    Takes the place of transformers' `Qwen3MoeExperts`: the same arguments, the same result.
    """

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.experts = experts
        self.gate_up = nn.Parameter(torch.zeros(experts, 2, ffn, hidden, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.gate_up_scale = nn.Parameter(torch.zeros(experts, 2, *grid((ffn, hidden))), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(experts, hidden, ffn, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.down_scale = nn.Parameter(torch.zeros(experts, *grid((hidden, ffn))), requires_grad=False)

    def forward(self, x_T_H: torch.Tensor, expert_T_K: torch.Tensor, weight_T_K: torch.Tensor) -> torch.Tensor:
        quantized = quantize_activations(x_T_H)

        def run(e: int, token: torch.Tensor) -> torch.Tensor:
            gate, up = (quantized[token] @ w.T for w in dequantize(self.gate_up[e], self.gate_up_scale[e]))
            return quantize_activations(_swiglu(gate, up, x_T_H.dtype)) @ dequantize(self.down[e], self.down_scale[e]).T

        return _mix_experts(x_T_H, expert_T_K, weight_T_K, run)


def quantize_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round `x` to e4m3 with a calibrated scale `[1]`, values beyond it saturate; returned widened to FP32."""
    return (x.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


class PerTensorFP8Linear(nn.Module):
    """A bias-free linear layer that holds e4m3 values, their one scale and the calibrated scale of its input."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.input_scale = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((quantize_static(x, self.input_scale) @ self.weight.float().T) * self.weight_scale).to(x.dtype)


class PerTensorFP8Experts(nn.Module):
    """As `BlockFP8Experts`, with one scale a matrix and one for each matrix's input."""

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.experts = experts
        self.gate_up = nn.Parameter(torch.zeros(experts, 2, ffn, hidden, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(experts, hidden, ffn, dtype=torch.float8_e4m3fn), requires_grad=False)
        for name, shape in (
            ("gate_up_scale", (experts, 2)),
            ("gate_up_input", (experts, 2)),
            ("down_scale", (experts,)),
            ("down_input", (experts,)),
        ):
            setattr(self, name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def forward(self, x_T_H: torch.Tensor, expert_T_K: torch.Tensor, weight_T_K: torch.Tensor) -> torch.Tensor:
        def run(e: int, token: torch.Tensor) -> torch.Tensor:
            gate, up = (
                (quantize_static(x_T_H[token], self.gate_up_input[e, i]) @ self.gate_up[e, i].float().T) * self.gate_up_scale[e, i]
                for i in range(2)
            )
            inner = _swiglu(gate, up, x_T_H.dtype)
            return (quantize_static(inner, self.down_input[e]) @ self.down[e].float().T) * self.down_scale[e]

        return _mix_experts(x_T_H, expert_T_K, weight_T_K, run)


def _swiglu(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The engine's activations are BF16 between products, and the next product quantizes those."""
    return nn.functional.silu(gate.to(dtype)) * up.to(dtype)


def _mix_experts(x_T_H: torch.Tensor, expert_T_K: torch.Tensor, weight_T_K: torch.Tensor, run) -> torch.Tensor:
    result = torch.zeros_like(x_T_H)
    for e in expert_T_K.unique().tolist():
        token, slot = torch.where(expert_T_K == e)
        # transformers 5.5 hands the router's weights over in FP32.
        result.index_add_(0, token, (run(e, token).to(x_T_H.dtype) * weight_T_K[token, slot, None]).to(x_T_H.dtype))
    return result
