"""`tensorrt_llm._torch.modules.linear`: parallel linear layers and how each quantization loads and finalises.

Live parameter names, fusion order and refusals are TensorRT-LLM's; the arithmetic is plain PyTorch.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter

from tensorrt_llm import _family
from tensorrt_llm._torch.distributed import Mapping, allgather, allreduce

E4M3 = torch.float8_e4m3fn


class TensorParallelMode(str, Enum):  # noqa: UP042  as in the package
    COLUMN = "column"
    ROW = "row"


class WeightMode(str, Enum):  # noqa: UP042
    VANILLA = "vanilla"
    FUSED_QKV_LINEAR = "fused_qkv_linear"
    FUSED_GATE_UP_LINEAR = "fused_gate_up_linear"


SHARD_KEYS = {WeightMode.VANILLA: (None,), WeightMode.FUSED_GATE_UP_LINEAR: ("gate", "up"), WeightMode.FUSED_QKV_LINEAR: ("q", "k", "v")}


def load_weight_shard(weight: torch.Tensor, size: int, rank: int, mode: TensorParallelMode | None) -> torch.Tensor:
    """This rank's part of a whole tensor: ceil(width / size) of the mode's dimension, as for scales so for weights."""
    if mode is None or size <= 1:
        return weight
    dim = 1 if mode == TensorParallelMode.ROW else 0
    if (weight.dim() == 1 and dim == 1) or weight.dim() == 0 or weight.shape[dim] == 1:
        return weight
    each = math.ceil(weight.shape[dim] / size)
    return weight.narrow(dim, min(rank * each, weight.shape[dim]), max(0, min(each, weight.shape[dim] - rank * each)))


def parameter(tensor: torch.Tensor) -> Parameter:
    return Parameter(tensor, requires_grad=False)


def quantize_1x128(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with one scale per row and 128 columns; widened to FP32."""
    width = x.shape[-1]
    blocks = F.pad(x.float(), (0, -width % 128)).unflatten(-1, (-1, 128))
    scale = (blocks.abs().amax(-1, keepdim=True) / torch.tensor(448.0)).clamp(min=1e-10)
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)[..., :width]


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape[-2:]
    return weight.float() * scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]


def quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    scale = (x.float().abs().amax() / 448.0).clamp(min=1e-10) if scale is None else scale
    return (x.float() / scale).clamp(-448, 448).to(E4M3).float() * scale


class LinearMethodBase:
    def create_weights(self, module: Linear, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def load_weights(self, module: Linear, weights: list[dict], allow_partial_loading: bool = False) -> None:
        if not allow_partial_loading:
            assert all("weight" in w for w in weights)
        mode = module.weights_loading_config
        assert len(weights) == len(SHARD_KEYS[mode])
        for key, shard in zip(SHARD_KEYS[mode], weights, strict=True):
            if "weight" in shard:
                place = module.shard_rows(module.weight, key)
                place.data.copy_(load_weight_shard(shard["weight"], module.tp_size, module.tp_rank, module.tp_mode).to(place.dtype))
        self.load_scales(module, weights)
        if not allow_partial_loading:
            self.process_weights_after_loading(module)

    def load_scales(self, module: Linear, weights: list[dict]) -> None: ...

    def process_weights_after_loading(self, module: Linear) -> None: ...

    def post_load_weights(self, module: Linear) -> None: ...


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(self, module, out_features, in_features, dtype) -> None:
        module.weight = parameter(torch.empty(out_features, in_features, dtype=dtype))
        module.rebuild_tensor_metadata = {}

    def apply(self, module: Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, module.weight)

    def pre_reload_weights(self, module: Linear) -> None:
        for name, metadata in module.rebuild_tensor_metadata.items():
            module.register_parameter(name, parameter(torch.empty_like(metadata["meta"], device="cpu")))


# In 1.2.x the FP8 methods are no subclasses, and so cannot be loaded in parts.
_Fp8Base = UnquantizedLinearMethod if _family.FP8_PARTIAL else LinearMethodBase


class FP8QDQLinearMethod(_Fp8Base):
    """Per tensor. Fused shards are requantised to the largest of their scales when the refit is finalised."""

    def create_weights(self, module, out_features, in_features, dtype) -> None:
        module.weight = parameter(torch.empty(out_features, in_features, dtype=E4M3))
        for name in ("weight_scale", "input_scale", "inv_input_scale"):
            setattr(module, name, parameter(torch.tensor(1.0)))
        module.kv_scales, module.inv_kv_scales = parameter(torch.ones(3)), parameter(torch.ones(3))
        module.rebuild_tensor_metadata = {}

    def apply(self, module: Linear, x: torch.Tensor) -> torch.Tensor:
        return (quantize_per_tensor(x, module.input_scale) @ (module.weight.float() * module.weight_scale).T).to(x.dtype)

    def load_scales(self, module: Linear, weights: list[dict]) -> None:
        fused = module.weights_loading_config != WeightMode.VANILLA
        if fused:
            for name in ("input", "weight"):
                if not hasattr(module, f"tmp_{name}_scales"):
                    device = getattr(module, f"{name}_scale").device  # a None input_scale fails here, as in the package
                    setattr(module, f"tmp_{name}_scales", torch.full((len(weights),), torch.nan, device=device))
        for i, shard in enumerate(weights):
            for name in ("input", "weight"):
                if f"{name}_scale" not in shard:
                    continue
                value = shard[f"{name}_scale"].float().reshape([])
                if fused:
                    getattr(module, f"tmp_{name}_scales")[i] = value
                else:
                    getattr(module, f"{name}_scale").data.copy_(value)
                if name == "input":
                    module.has_static_input_scale = True
                    if not fused:
                        module.inv_input_scale.data = 1.0 / module.input_scale.data

    def process_weights_after_loading(self, module: Linear) -> None:
        if module.weights_loading_config == WeightMode.VANILLA:
            if not hasattr(module, "has_static_input_scale"):
                module.input_scale = module.inv_input_scale = None
            else:
                del module.has_static_input_scale
            return
        if hasattr(module, "has_static_input_scale"):
            module.input_scale.data.copy_(module.tmp_input_scales.max())
            module.inv_input_scale.data.copy_(1.0 / module.input_scale.data)
            del module.has_static_input_scale
        else:
            module.input_scale = module.inv_input_scale = None
        largest = module.tmp_weight_scales.max()
        module.weight_scale.data.copy_(largest)
        for i, key in enumerate(SHARD_KEYS[module.weights_loading_config]):
            shard = module.shard_rows(module.weight, key).data
            shard.copy_((shard.to(module.dtype) * module.tmp_weight_scales[i] / largest).to(E4M3))
        del module.tmp_weight_scales, module.tmp_input_scales


class FP8BlockScalesLinearMethod(_Fp8Base):
    """e4m3 with an FP32 scale for each 128x128 block of the rank's own fused weight."""

    def create_weights(self, module, out_features, in_features, dtype) -> None:
        module.weight = parameter(torch.empty(out_features, in_features, dtype=E4M3))
        module.weight_scale = parameter(torch.empty(math.ceil(out_features / 128), math.ceil(in_features / 128)))
        module.input_scale, module.inv_input_scale = parameter(torch.tensor(1.0)), parameter(torch.tensor(1.0))
        module.rebuild_tensor_metadata = {}

    def apply(self, module: Linear, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return (quantize_1x128(x) @ dequantize(module.weight, module.weight_scale).T).to(x.dtype)

    def _scale_name(self, weights: list[dict]) -> str:
        looked = weights[:1] if _family.knob("FIRST_SHARD_SCALE") else weights
        return "weight_scale_inv" if any("weight_scale_inv" in w for w in looked) else "weight_scale"

    def load_scales(self, module: Linear, weights: list[dict]) -> None:
        if _family.knob("DEEPGEMM_KEYERROR"):  # early DeepGEMM on SM100: a weight must come with its scale
            for shard in weights:
                if "weight" in shard and not {"weight_scale_inv", "weight_scale"} & shard.keys():
                    raise KeyError("weight_scale_inv")
        name = self._scale_name(weights)
        for key, shard in zip(SHARD_KEYS[module.weights_loading_config], weights, strict=True):
            if name not in shard:
                continue
            scale = load_weight_shard(shard[name], module.tp_size, module.tp_rank, module.tp_mode)
            if key is None:
                module.weight_scale.data.copy_(scale)
            else:
                offset, size = (math.ceil(n / 128) for n in module.fused_weight_shard_indices_mapping[key])
                module.weight_scale.data[offset : offset + size].copy_(scale)

    def post_load_weights(self, module: Linear) -> None:
        if _family.knob("BLACKWELL"):  # new Parameter objects and another scale layout; values kept, so that it still computes
            for name in ("weight", "weight_scale"):
                old = getattr(module, name)
                module.rebuild_tensor_metadata[name] = {"meta": torch.empty_like(old, device="meta")}
                module.register_parameter(name, parameter(old.data.clone()))


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        mapping: Mapping,
        tensor_parallel_mode: TensorParallelMode | None = None,
        weights_loading_config: WeightMode = WeightMode.VANILLA,
        fused_sizes: tuple[int, ...] = (),
        quant_algo: str | None = None,
        gather_output: bool = False,
    ) -> None:
        """`fused_sizes`: rows of each shard on this rank."""
        super().__init__()
        self.mapping, self.dtype, self.tp_mode = mapping, dtype, tensor_parallel_mode
        self.tp_size, self.tp_rank = (mapping.tp_size, mapping.tp_rank) if tensor_parallel_mode else (1, 0)
        self.weights_loading_config, self.gather_output = weights_loading_config, gather_output
        self.in_features = in_features // self.tp_size if tensor_parallel_mode == TensorParallelMode.ROW else in_features
        self.out_features = out_features // self.tp_size if tensor_parallel_mode == TensorParallelMode.COLUMN else out_features
        if fused_sizes:
            starts = [sum(fused_sizes[:i]) for i in range(len(fused_sizes))]
            keys = SHARD_KEYS[weights_loading_config]
            self.fused_weight_shard_indices_mapping = dict(zip(keys, zip(starts, fused_sizes, strict=True), strict=True))
        methods = {None: UnquantizedLinearMethod, "FP8": FP8QDQLinearMethod, "FP8_BLOCK_SCALES": FP8BlockScalesLinearMethod}
        self.quant_method = methods[quant_algo]()
        self.quant_method.create_weights(self, self.out_features, self.in_features, dtype)

    def shard_rows(self, tensor: torch.Tensor, key: str | None) -> torch.Tensor:
        if key is None:
            return tensor
        offset, size = self.fused_weight_shard_indices_mapping[key]
        return tensor[offset : offset + size]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.quant_method.apply(self, x)
        if self.tp_size > 1 and self.tp_mode == TensorParallelMode.ROW:
            return allreduce(y, self.mapping)
        return allgather(y, self.mapping) if self.gather_output and self.tp_size > 1 else y

    def load_weights(self, weights: list[dict], allow_partial_loading: bool = False) -> None:
        if not isinstance(self.quant_method, UnquantizedLinearMethod):
            assert allow_partial_loading is False, "allow_partial_loading is only supported for unquantized linear methods now"
        self.quant_method.load_weights(self, weights, allow_partial_loading)

    def process_weights_after_loading(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    def post_load_weights(self) -> None:
        self.quant_method.post_load_weights(self)

    def pre_reload_weights(self) -> None:
        assert hasattr(self.quant_method, "pre_reload_weights"), "pre_reload_weights is not supported for this quant method"
        self.quant_method.pre_reload_weights(self)
