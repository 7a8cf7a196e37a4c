"""Transformers' Qwen3 as an inference model: FP8 layers put in, live tensors by HF name, a slotted KV cache."""

from __future__ import annotations

import torch
import transformers

from trt_rl.arch import Arch
from trt_rl.refit.precision import PrecisionTable, input_scale, per_tensor_scale, scale_name
from trt_rl.rollout.fp8 import BlockFP8Experts, BlockFP8Linear, PerTensorFP8Experts, PerTensorFP8Linear


def build(model_path: str, arch: Arch, table: PrecisionTable, device: torch.device) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model on `device` with all weights zero, and views of its live tensors under the names a refit uses.

    Every value of the model is in exactly one view, so writing all views sets all weights. The model must not be
    moved afterwards: views of fused tensors would stay behind.
    """
    config = transformers.AutoConfig.from_pretrained(model_path)
    live: dict[str, torch.Tensor] = {}
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = model.eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.zero_()
        for name in table.shapes:
            if ".mlp.experts." not in name:
                live |= _linear_or_plain(model, name, table)
        for layer in arch.moe_layers:
            live |= _experts(model, layer, arch, table)
    return model, {name: live[name] for name in table.wire_tensors()}


def _linear_or_plain(model: torch.nn.Module, name: str, table: PrecisionTable) -> dict[str, torch.Tensor]:
    path, _ = name.rsplit(".", 1)
    if table.formats[name] == "bf16":
        return {name: model.get_parameter(name)}
    if table.formats[name] == "fp8_per_tensor":
        linear = PerTensorFP8Linear(*table.shapes[name])
        live = {name: linear.weight, per_tensor_scale(name): linear.weight_scale, input_scale(name): linear.input_scale}
    else:
        linear = BlockFP8Linear(*table.shapes[name])
        live = {name: linear.weight, scale_name(name): linear.weight_scale_inv}
    model.set_submodule(path, linear)
    return live


def _experts(model: torch.nn.Module, layer: int, arch: Arch, table: PrecisionTable) -> dict[str, torch.Tensor]:
    at, live = f"model.layers.{layer}.mlp.experts", {}
    format = table.formats[f"{at}.0.down_proj.weight"]  # the table gives all experts of a layer one format
    if format == "fp8_per_tensor":
        experts = PerTensorFP8Experts(arch.experts, arch.hidden, arch.moe_ffn)
        model.set_submodule(at, experts)
        for e in range(arch.experts):
            places = [
                (m, experts.gate_up[e, i], experts.gate_up_scale[e, i], experts.gate_up_input[e, i]) for i, m in enumerate(("gate", "up"))
            ]
            for matrix, weight, scale, inputs in (*places, ("down", experts.down[e], experts.down_scale[e], experts.down_input[e])):
                name = f"{at}.{e}.{matrix}_proj.weight"
                live |= {name: weight, per_tensor_scale(name): scale.view(1), input_scale(name): inputs.view(1)}
    elif format == "fp8_block":
        experts = BlockFP8Experts(arch.experts, arch.hidden, arch.moe_ffn)
        model.set_submodule(at, experts)
        for e in range(arch.experts):
            for i, matrix in enumerate(("gate_proj", "up_proj")):
                live[f"{at}.{e}.{matrix}.weight"] = experts.gate_up[e, i]
                live[f"{at}.{e}.{matrix}.weight_scale_inv"] = experts.gate_up_scale[e, i]
            live[f"{at}.{e}.down_proj.weight"] = experts.down[e]
            live[f"{at}.{e}.down_proj.weight_scale_inv"] = experts.down_scale[e]
    else:
        experts = model.get_submodule(at)
        for e in range(arch.experts):
            live[f"{at}.{e}.gate_proj.weight"] = experts.gate_up_proj[e, : arch.moe_ffn]
            live[f"{at}.{e}.up_proj.weight"] = experts.gate_up_proj[e, arch.moe_ffn :]
            live[f"{at}.{e}.down_proj.weight"] = experts.down_proj[e]
    return live


class SlotCache:
    """Keys and values of many sequences, one slot each, with room that grows on demand.

    Passed to transformers as `past_key_values`: the model calls only `update`. `rows` and `positions` say where
    the current forward pass writes; attention reads positions `[0, width)` of those rows.
    """

    def __init__(self, arch: Arch, device: torch.device) -> None:
        self.arch, self.device = arch, device
        self.slots = self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._allocate(0, 0)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens, keeping what is there."""
        if slots > self.slots or length > self.length:
            self._allocate(max(slots, self.slots), max(-(-length // 64) * 64, self.length))

    def _allocate(self, slots: int, length: int) -> None:
        shape = (slots, self.arch.kv_heads, length, self.arch.head_dim)
        for kind in ("keys", "values"):
            old = getattr(self, kind)
            new = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(self.arch.layers)]
            for wide, narrow in zip(new, old, strict=False):
                wide[: self.slots, :, : self.length] = narrow
            setattr(self, kind, new)
        self.slots, self.length = slots, length

    def at(self, rows_B: torch.Tensor, positions_B_S: torch.Tensor, width: int) -> SlotCache:
        self.rows, self.positions, self.width = rows_B, positions_B_S, width
        return self

    def update(self, key_B_H_S_D: torch.Tensor, value_B_H_S_D: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        result = []
        for store, new in ((self.keys[layer], key_B_H_S_D), (self.values[layer], value_B_H_S_D)):
            store[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
            result.append(store[self.rows, :, : self.width])
        return result[0], result[1]

    def read(self, row: int, length: int) -> list[torch.Tensor]:
        """A copy of one sequence: keys and values stacked `[2, heads, length, head_dim]`, per layer."""
        return [torch.stack([k[row, :, :length], v[row, :, :length]]) for k, v in zip(self.keys, self.values, strict=True)]

    def write(self, rows: list[int], sequence: list[torch.Tensor]) -> None:
        """Copy one sequence, as `read` gives it, into several slots."""
        length = sequence[0].shape[2]
        for k, v, kv in zip(self.keys, self.values, sequence, strict=True):
            k[rows, :, :length], v[rows, :, :length] = kv[0], kv[1]
