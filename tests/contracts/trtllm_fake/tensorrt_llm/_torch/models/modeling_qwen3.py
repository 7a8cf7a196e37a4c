"""Qwen3 and Qwen3-MoE as TensorRT-LLM's PyTorch backend arranges them: one rank's slices under its parameter names."""

from __future__ import annotations

import fnmatch
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm import _family
from tensorrt_llm._fake_moe import FusedMoE
from tensorrt_llm._torch.distributed import Mapping
from tensorrt_llm._torch.modules.embedding import Embedding, LMHead
from tensorrt_llm._torch.modules.linear import Linear, TensorParallelMode, WeightMode, parameter

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class ModelConfig:
    """HF config, quantization and mapping of one rank."""

    def __init__(self, pretrained_config: Any, mapping: Mapping, algo: str | None, excluded: list[str]) -> None:
        self.pretrained_config, self.mapping, self.quant_algo, self.excluded = pretrained_config, mapping, algo, excluded

    def algo_of(self, name: str) -> str | None:
        """Quantization of the module `name`, a TensorRT-LLM or an HF path."""
        path, _, last = name.rpartition(".")
        names = [name, *(f"{path}.{part}" for part in FUSED.get(last, ()))]
        return None if any(fnmatch.fnmatchcase(n, pattern) for n in names for pattern in self.excluded) else self.quant_algo


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = parameter(torch.ones(size, dtype=dtype)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hf, mapping, tp = config.pretrained_config, config.mapping, config.mapping.tp_size
        self.layer, self.mapping, dtype = layer, mapping, hf.dtype
        self.head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        assert hf.num_attention_heads % tp == 0, f"num_heads {hf.num_attention_heads} must be divisible by tp_size {tp}"
        self.heads, self.kv_heads = hf.num_attention_heads // tp, max(1, hf.num_key_value_heads // tp)
        q, kv, at = self.heads * self.head_dim, self.kv_heads * self.head_dim, f"model.layers.{layer}.self_attn"
        self.qkv_proj = Linear(
            hf.hidden_size,
            (q + 2 * kv) * tp,
            dtype,
            mapping,
            TensorParallelMode.COLUMN,
            WeightMode.FUSED_QKV_LINEAR,
            (q, kv, kv),
            config.algo_of(f"{at}.qkv_proj"),
        )
        self.o_proj = Linear(q * tp, hf.hidden_size, dtype, mapping, TensorParallelMode.ROW, quant_algo=config.algo_of(f"{at}.o_proj"))
        self.q_norm = RMSNorm(self.head_dim, hf.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(self.head_dim, hf.rms_norm_eps, dtype)

    def forward(self, x_B_S_H: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: Any) -> torch.Tensor:
        b, s, _ = x_B_S_H.shape
        q, k, v = self.qkv_proj(x_B_S_H).unflatten(-1, (-1, self.head_dim)).split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = (rotate(norm(part).transpose(1, 2), rope) for part, norm in ((q, self.q_norm), (k, self.k_norm)))
        keys, values = cache.update(k, v.transpose(1, 2), self.layer)
        keys, values = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (keys, values))
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=cache.mask)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = (t.to(x.dtype).unsqueeze(1) for t in rope)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hf, mapping, at = config.pretrained_config, config.mapping, f"model.layers.{layer}.mlp"
        each = hf.intermediate_size // mapping.tp_size
        self.gate_up_proj = Linear(
            hf.hidden_size,
            2 * hf.intermediate_size,
            hf.dtype,
            mapping,
            TensorParallelMode.COLUMN,
            WeightMode.FUSED_GATE_UP_LINEAR,
            (each, each),
            config.algo_of(f"{at}.gate_up_proj"),
        )
        self.down_proj = Linear(
            hf.intermediate_size, hf.hidden_size, hf.dtype, mapping, TensorParallelMode.ROW, quant_algo=config.algo_of(f"{at}.down_proj")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Qwen3Gate(nn.Module):
    """The router; never quantized."""

    def __init__(self, hidden: int, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(torch.empty(experts, hidden, dtype=dtype))

    def load_weights(self, weights: list[dict]) -> None:
        assert len(weights) == 1
        self.weight.data.copy_(weights[0]["weight"])


class Qwen3MoE(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hf = config.pretrained_config
        self.top_k, self.renormalize = hf.num_experts_per_tok, hf.norm_topk_prob
        self.gate = Qwen3Gate(hf.hidden_size, hf.num_experts, hf.dtype)
        algo = config.algo_of(f"model.layers.{layer}.mlp.experts")
        self.experts = FusedMoE(hf.num_experts, hf.hidden_size, hf.moe_intermediate_size, hf.dtype, config.mapping, algo)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        weight, expert = torch.softmax(F.linear(flat, self.gate.weight).float(), -1).topk(self.top_k, -1)
        if self.renormalize:
            weight = weight / weight.sum(-1, keepdim=True)
        return self.experts(flat, expert, weight.to(x.dtype)).view_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hf = config.pretrained_config
        self.self_attn = Qwen3Attention(config, layer)
        dense = layer in (getattr(hf, "mlp_only_layers", None) or []) or (layer + 1) % (getattr(hf, "decoder_sparse_step", 1) or 1)
        moe = getattr(hf, "num_experts", 0) and hf.model_type == "qwen3_moe" and not dense
        self.mlp = Qwen3MoE(config, layer) if moe else GatedMLP(config, layer)
        self.input_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, hf.dtype)
        self.post_attention_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, hf.dtype)

    def forward(self, x: torch.Tensor, rope: tuple, cache: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf = config.pretrained_config
        self.embed_tokens = Embedding(hf.vocab_size, hf.hidden_size, hf.dtype, config.mapping, gather_output=False)
        self.layers = nn.ModuleList([DecoderLayer(config, i) for i in range(hf.num_hidden_layers)])
        self.norm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, hf.dtype)


class Qwen3ForCausalLM(nn.Module):
    """`Qwen3MoeForCausalLM` too: layers decide for themselves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model_config, self.config = config, config.pretrained_config
        self.model = Qwen3Model(config)
        self.lm_head = LMHead(self.config.vocab_size, self.config.hidden_size, self.config.dtype, config.mapping)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        head_dim = self.model.layers[0].self_attn.head_dim
        rope = getattr(self.config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(self.config, "rope_theta", 10000.0)
        self._frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)  # no buffer: not a weight

    def forward(self, tokens_B_S: torch.Tensor, positions_B_S: torch.Tensor, last_B: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits `[B, V]` in FP32 after each row's `last_B`-th token."""
        angles = positions_B_S[..., None].float() * self._frequencies
        rope = (torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
        x = self.model.embed_tokens(tokens_B_S)
        for layer in self.model.layers:
            x = layer(x, rope, cache)
        return self.lm_head(self.model.norm(x[torch.arange(len(x)), last_B])).float()

    def post_load_weights(self) -> None:
        if str(self.model_config.mapping.rank) == _family.knob("FLIP_BIT_RANK"):
            value = self.get_parameter(_family.knob("FLIP_BIT_PARAMETER", "model.norm.weight"))
            value.data.view(torch.uint8).flatten()[0] ^= 1

    def load_weights(self, weights: dict, weight_mapper: HfWeightMapper, allow_partial_loading: bool = False) -> None:
        """Module by module; names that belong to no module are passed over in silence, as in the package."""
        for name, module in self.named_modules(remove_duplicate=False):
            if not module._parameters or (self.config.tie_word_embeddings and name.startswith("lm_head")):
                continue
            path, _, last = name.rpartition(".")
            if last in FUSED:
                shards = [weight_mapper.shard(filter_weights(f"{path}.{part}", weights), part, module) for part in FUSED[last]]
                module.load_weights(weights=shards, allow_partial_loading=allow_partial_loading)
                continue
            mine = filter_weights(name, weights)
            if not mine:
                continue
            if isinstance(module, FusedMoE):
                module.load_weights(weights=[rename_experts(mine)], allow_partial_loading=allow_partial_loading)
            elif "allow_partial_loading" in inspect.signature(getattr(module, "load_weights", _none)).parameters:
                module.load_weights(weights=[mine], allow_partial_loading=allow_partial_loading)
            else:
                for own, value in module.named_parameters(recurse=False):
                    assert allow_partial_loading or own in mine
                    if own in mine:
                        value.data.copy_(mine[own])


def _none() -> None: ...


def filter_weights(prefix: str, weights: dict) -> dict:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in weights.items() if name.startswith(prefix + ".")}


def rename_experts(weights: dict) -> dict:
    """`3.gate_proj.weight` -> `3.w1.weight`."""
    renamed = {}
    for name, tensor in weights.items():
        for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


class HfWeightMapper:
    """Repeats KV heads where there are fewer than ranks: weights always, block scales only for Qwen3-MoE."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.kv_heads, self.tp = model.config.num_key_value_heads, model.model_config.mapping.tp_size
        self.scales_too = model.config.model_type == "qwen3_moe" and model.model_config.quant_algo == "FP8_BLOCK_SCALES"
        self.sweep: str | None = None

    def begin_update_weights(self) -> None:
        self.sweep = "open"

    def finalize_update_weights(self) -> None:
        self.sweep = None

    def abort_update_weights(self) -> None:
        self.sweep = "aborted"

    def shard(self, weights: dict, part: str, module: nn.Module) -> dict:
        if part not in ("k_proj", "v_proj") or self.kv_heads >= self.tp:
            return weights
        repeated = {"weight", "bias"} | ({"weight_scale_inv"} if self.scales_too else set())
        return {k: self._repeat(v) if k in repeated else v for k, v in weights.items()}

    def _repeat(self, weight: torch.Tensor) -> torch.Tensor:
        assert self.tp % self.kv_heads == 0 and weight.shape[0] % self.kv_heads == 0
        return weight.unflatten(0, (self.kv_heads, -1)).repeat_interleave(math.ceil(self.tp / self.kv_heads), 0).flatten(0, 1)
