"""Fake only: how fused experts are held, loaded and finalised (`…fused_moe.quantization`, whose place differs by release).

In `w3_w1_weight` the up projection (w3) comes first, then the gate (w1).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm import _family
from tensorrt_llm._torch.distributed import Mapping, allreduce
from tensorrt_llm._torch.modules.linear import (
    E4M3,
    TensorParallelMode,
    dequantize,
    load_weight_shard,
    parameter,
    quantize_1x128,
    quantize_per_tensor,
)

COLUMN, ROW = TensorParallelMode.COLUMN, TensorParallelMode.ROW


class FusedMoEMethodBase:
    weight_dtype: torch.dtype | None = None

    def create_weights(self, module: FusedMoE) -> None:
        dtype = self.weight_dtype or module.dtype
        e, i, h = module.expert_size_per_partition, module.intermediate_size_per_partition, module.hidden_size
        module.w3_w1_weight = parameter(torch.empty(e, 2 * i, h, dtype=dtype))
        module.w2_weight = parameter(torch.empty(e, h, i, dtype=dtype))
        module.rebuild_tensor_metadata = {}

    def load_weights(self, module: FusedMoE, weights: dict, allow_partial_loading: bool = False) -> None:
        if allow_partial_loading and not isinstance(self, _partial()):
            raise NotImplementedError(f"Partial loading is not supported for {type(self).__name__}")
        for slot, expert in enumerate(module.initial_local_expert_ids):
            halves = module.w3_w1_weight.data[slot].chunk(2, dim=0)
            for name, place, mode in (("w1", halves[1], COLUMN), ("w3", halves[0], COLUMN), ("w2", module.w2_weight.data[slot], ROW)):
                weight = weights.get(f"{expert}.{name}.weight")
                if weight is None:
                    assert allow_partial_loading, f"{expert}.{name}.weight"
                    continue
                part = load_weight_shard(weight, module.tp_size, module.tp_rank, mode).contiguous()
                if name == "w1" and part.shape[0] != place.shape[0]:
                    raise ValueError(f"Shape mismatch between w1_weight_shard and dst_w1_weight! {part.shape}, {place.shape}")
                place.copy_(part.view(place.dtype))  # a bit view: another width of element is an error, not a conversion
        self.load_quant_scales(module, weights)
        if not allow_partial_loading:
            self.process_weights_after_loading(module)

    def load_quant_scales(self, module: FusedMoE, weights: dict) -> None: ...

    def process_weights_after_loading(self, module: FusedMoE) -> None: ...

    def post_load_weights(self, module: FusedMoE) -> None: ...

    def pre_reload_weights(self, module: FusedMoE) -> None:
        for name, metadata in module.rebuild_tensor_metadata.items():
            module.register_parameter(name, parameter(torch.empty_like(metadata["meta"], device="cpu")))

    def expert(self, module: FusedMoE, slot: int, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def expert(self, module, slot, x):
        up, gate = F.linear(x, module.w3_w1_weight[slot]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, module.w2_weight[slot])


class FP8QDQFusedMoEMethod(FusedMoEMethodBase):
    weight_dtype = E4M3

    def create_weights(self, module) -> None:
        super().create_weights(module)
        e = module.expert_size_per_partition
        module.fc31_dequant, module.fc2_dequant = parameter(torch.empty(e)), parameter(torch.empty(e))
        module.fc2_quant, module.fc31_input_dequant = parameter(torch.tensor(1.0)), parameter(torch.tensor(1.0))

    def load_quant_scales(self, module, weights) -> None:
        for name, shape in (
            ("tmp_fc31_input_scale", (module.num_experts, 2)),
            ("tmp_fc2_input_scale", (module.num_experts,)),
            ("tmp_w3_w1_weight_scale", (module.expert_size_per_partition, 2)),
            ("tmp_w2_weight_scale", (module.expert_size_per_partition,)),
        ):
            if not hasattr(module, name):
                setattr(module, name, torch.full(shape, torch.nan))  # empty memory in the package: garbage if not loaded
        for e in range(module.num_experts):
            for column, name in ((0, "w1"), (1, "w3")):
                if (scale := weights.get(f"{e}.{name}.input_scale")) is not None:
                    module.tmp_fc31_input_scale[e, column] = scale.float().reshape([])
            if (scale := weights.get(f"{e}.w2.input_scale")) is not None:
                module.tmp_fc2_input_scale[e] = scale.float().reshape([])
        for slot, e in enumerate(module.initial_local_expert_ids):
            for column, name in ((0, "w1"), (1, "w3")):
                if (scale := weights.get(f"{e}.{name}.weight_scale")) is not None:
                    module.tmp_w3_w1_weight_scale[slot, column] = scale.float().reshape([])
            if (scale := weights.get(f"{e}.w2.weight_scale")) is not None:
                module.tmp_w2_weight_scale[slot] = scale.float().reshape([])

    def process_weights_after_loading(self, module) -> None:
        input31, input2 = module.tmp_fc31_input_scale.max(), module.tmp_fc2_input_scale.max()
        largest = module.tmp_w3_w1_weight_scale.max(dim=1).values
        for slot in range(module.expert_size_per_partition):
            w3, w1 = module.w3_w1_weight.data[slot].chunk(2, dim=0)
            for part, scale in ((w1, module.tmp_w3_w1_weight_scale[slot, 0]), (w3, module.tmp_w3_w1_weight_scale[slot, 1])):
                part.copy_((part.to(module.dtype) * scale / largest[slot]).to(E4M3))
        module.fc31_dequant.data.copy_(largest * input31)
        module.fc2_quant.data.copy_(input2.reciprocal())
        module.fc2_dequant.data.copy_(module.tmp_w2_weight_scale * input2)
        module.fc31_input_dequant.data.copy_(input31)
        for name in ("tmp_w3_w1_weight_scale", "tmp_w2_weight_scale", "tmp_fc31_input_scale", "tmp_fc2_input_scale"):
            delattr(module, name)

    def expert(self, module, slot, x):
        inputs, inner = module.fc31_input_dequant, 1 / module.fc2_quant
        y = quantize_per_tensor(x, inputs) @ module.w3_w1_weight[slot].float().T * (module.fc31_dequant[slot] / inputs)
        up, gate = y.to(x.dtype).chunk(2, -1)
        y = quantize_per_tensor(F.silu(gate) * up, inner) @ module.w2_weight[slot].float().T
        return (y * (module.fc2_dequant[slot] / inner)).to(x.dtype)


class DeepSeekFP8BlockScalesFusedMoEMethod(FusedMoEMethodBase):
    weight_dtype = E4M3

    def create_weights(self, module) -> None:
        if _family.LIFECYCLE:
            assert module.intermediate_size_per_partition % 128 == 0, (
                f"intermediate_size_per_partition ({module.intermediate_size_per_partition}) must be divisible by 128"
            )
        super().create_weights(module)
        e, i, h = module.expert_size_per_partition, module.intermediate_size_per_partition, module.hidden_size
        i, h = math.ceil(i / 128), math.ceil(h / 128)
        module.w3_w1_weight_scaling_factor = parameter(torch.empty(e, 2 * i, h))
        module.w2_weight_scaling_factor = parameter(torch.empty(e, h, i))

    def load_quant_scales(self, module, weights) -> None:
        for slot, e in enumerate(module.initial_local_expert_ids):
            w3, w1 = module.w3_w1_weight_scaling_factor.data[slot].chunk(2, dim=0)
            for name, place, mode in (("w1", w1, COLUMN), ("w3", w3, COLUMN), ("w2", module.w2_weight_scaling_factor.data[slot], ROW)):
                scale = weights.get(f"{e}.{name}.weight_scale_inv")
                if scale is not None:
                    place.copy_(load_weight_shard(scale, module.tp_size, module.tp_rank, mode))
                elif _family.knob("DEEPGEMM_KEYERROR") and f"{e}.{name}.weight" in weights:
                    raise KeyError(f"{e}.{name}.weight_scale_inv")

    def post_load_weights(self, module) -> None:
        if _family.knob("BLACKWELL"):
            for name in ("w3_w1_weight", "w2_weight", "w3_w1_weight_scaling_factor", "w2_weight_scaling_factor"):
                old = getattr(module, name)
                module.rebuild_tensor_metadata[name] = {"meta": torch.empty_like(old, device="meta")}
                module.register_parameter(name, parameter(old.data.clone()))

    def expert(self, module, slot, x):
        w3_w1 = dequantize_halves(module.w3_w1_weight[slot], module.w3_w1_weight_scaling_factor[slot])
        up, gate = (quantize_1x128(x) @ w3_w1.T).to(x.dtype).chunk(2, -1)
        w2 = dequantize(module.w2_weight[slot], module.w2_weight_scaling_factor[slot])
        return (quantize_1x128(F.silu(gate) * up) @ w2.T).to(x.dtype)


class DeepSeekFP8BlockScalesFusedMoEMethodDeepGemm(DeepSeekFP8BlockScalesFusedMoEMethod): ...


def dequantize_halves(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.cat([dequantize(w, s) for w, s in zip(weight.chunk(2), scale.chunk(2), strict=True)])


def _partial() -> tuple[type, ...]:
    if not _family.FP8_PARTIAL:
        return (UnquantizedFusedMoEMethod,)
    return (UnquantizedFusedMoEMethod, FP8QDQFusedMoEMethod, DeepSeekFP8BlockScalesFusedMoEMethod)


class FusedMoE(nn.Module):
    def __init__(self, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, mapping: Mapping, algo: str | None) -> None:
        super().__init__()
        self.mapping, self.dtype, self.num_experts = mapping, dtype, num_experts
        self.tp_size, self.tp_rank = mapping.moe_tp_size, mapping.moe_tp_rank
        self.ep_size, self.ep_rank = mapping.moe_ep_size, mapping.moe_ep_rank
        self.hidden_size, self.intermediate_size_per_partition = hidden, intermediate // self.tp_size
        self.expert_size_per_partition = num_experts // self.ep_size
        start = self.ep_rank * self.expert_size_per_partition
        self.initial_local_expert_ids = list(range(start, start + self.expert_size_per_partition))
        methods = {None: UnquantizedFusedMoEMethod, "FP8": FP8QDQFusedMoEMethod, "FP8_BLOCK_SCALES": DeepSeekFP8BlockScalesFusedMoEMethod}
        self.quant_method = methods[algo]()
        self.quant_method.create_weights(self)

    def forward(self, x_T_H: torch.Tensor, expert_T_K: torch.Tensor, weight_T_K: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x_T_H.shape, dtype=torch.float32)
        for e in expert_T_K.unique().tolist():
            if e in self.initial_local_expert_ids:
                token, choice = torch.where(expert_T_K == e)
                part = self.quant_method.expert(self, e - self.initial_local_expert_ids[0], x_T_H[token])
                y.index_add_(0, token, part.float() * weight_T_K[token, choice, None].float())
        return (allreduce(y, self.mapping) if self.mapping.tp_size > 1 else y).to(x_T_H.dtype)

    def load_weights(self, weights: list[dict], allow_partial_loading: bool = False) -> None:
        assert len(weights) == 1
        self.quant_method.load_weights(self, weights[0], allow_partial_loading)

    def process_weights_after_loading(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    def post_load_weights(self) -> None:
        self.quant_method.post_load_weights(self)

    def pre_reload_weights(self) -> None:
        self.quant_method.pre_reload_weights(self)
