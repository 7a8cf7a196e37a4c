"""A Qwen3 as SGLang holds it: fused parameters under SGLang's names, and the way back to whole Hugging Face tensors.

Shapes and names as in sglang/srt/models/{qwen3,qwen3_moe}.py, layers/linear.py, vocab_parallel_embedding.py and
quantization/fp8.py of 0.5.16. Independent of `trt_rl.rollout.sglang_worker`, which has to agree with it.
"""

from __future__ import annotations

import torch
from torch import nn

_LINEAR, _FP8 = "UnquantizedLinearMethod", "Fp8LinearMethod"


class Backend:
    def __init__(self, value: str) -> None:
        self.value = value


class Runner:
    def __init__(self, backend: str) -> None:
        self.runner_backend = Backend(backend)


def method(kind: str, **attributes) -> object:
    made = type(kind, (), {})()
    made.__dict__.update(attributes)
    return made


def blocks(n: int) -> int:
    return -(-n // 128)


class FakeModel(nn.Module):
    """One rank's parameters; values are random, as `load_format="dummy"` leaves them."""

    def __init__(self, config: dict, tp: int, ep: int, rank: int, moe_backend: str) -> None:
        super().__init__()
        config = config | {"num_experts": config.get("num_experts") or config.get("num_local_experts")}
        self.config, self.tp, self.ep, self.rank = config, tp, ep, rank
        quantization = config.get("quantization_config")
        self.ignored = quantization["modules_to_not_convert"] if quantization else None
        self.moe_backend = "triton" if moe_backend == "auto" else moe_backend
        h, d = config["hidden_size"], config["head_dim"]
        heads, kv = config["num_attention_heads"] // tp, max(config["num_key_value_heads"] // tp, 1)
        vocab = -(-config["vocab_size"] // 64) * 64 // tp
        self.sizes = {"qkv_proj": (heads * d, kv * d, kv * d), "gate_up_proj": (config["intermediate_size"] // tp,) * 2}
        self._plain("model.embed_tokens", vocab, h)
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            self._plain(f"{at}.input_layernorm", h)
            self._linear(f"{at}.self_attn.qkv_proj", sum(self.sizes["qkv_proj"]), h, ("q_proj", "k_proj", "v_proj"))
            self._linear(f"{at}.self_attn.o_proj", h, heads * d)
            self._plain(f"{at}.self_attn.q_norm", d)
            self._plain(f"{at}.self_attn.k_norm", d)
            if self.ignored is not None:
                for scale in ("k_scale", "v_scale"):
                    self._add(f"{at}.self_attn.attn.{scale}", torch.ones(()))
            self._plain(f"{at}.post_attention_layernorm", h)
            if config["num_experts"]:
                self._experts(f"{at}.mlp", h)
            else:
                self._linear(f"{at}.mlp.gate_up_proj", sum(self.sizes["gate_up_proj"]), h, ("gate_proj", "up_proj"))
                self._linear(f"{at}.mlp.down_proj", h, config["intermediate_size"] // tp)
        self._plain("model.norm", h)
        if not config.get("tie_word_embeddings"):
            self._plain("lm_head", vocab, h)

    def _module(self, path: str) -> nn.Module:
        module = self
        for part in path.split("."):
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        return module

    def _add(self, name: str, value: torch.Tensor) -> None:
        path, leaf = name.rsplit(".", 1)
        self._module(path).register_parameter(leaf, nn.Parameter(value, requires_grad=False))

    def _plain(self, path: str, *shape: int) -> None:
        self._add(f"{path}.weight", torch.randn(shape).bfloat16())

    def _skipped(self, path: str, shards: tuple[str, ...] = ()) -> bool:
        """`is_layer_skipped`: shards of a fused layer are looked up by their own names."""
        if self.ignored is None:
            return True
        owner, _, matrix = path.rpartition(".")
        found = {f"{owner}.{shard}" in self.ignored for shard in shards or (matrix,)}
        if len(found) > 1:
            raise ValueError(f"Detected some but not all shards of {path} are quantized.")
        return found.pop()

    def _linear(self, path: str, rows: int, columns: int, shards: tuple[str, ...] = ()) -> None:
        bf16 = self._skipped(path, shards)
        self._module(path).quant_method = method(_LINEAR if bf16 else _FP8)
        if bf16:
            return self._plain(path, rows, columns)
        for size in self.sizes[path.rsplit(".", 1)[1]] if shards else ():
            if size % 128:
                raise ValueError(f"Weight output_partition_size = {size} is not divisible by weight quantization block_n = 128.")
        self._add(f"{path}.weight", torch.randn(rows, columns).to(torch.float8_e4m3fn))
        self._add(f"{path}.weight_scale_inv", torch.full((blocks(rows), blocks(columns)), torch.finfo(torch.float32).min))

    def _experts(self, path: str, h: int) -> None:
        e, ffn = self.config["num_experts"] // self.ep, self.config["moe_intermediate_size"] // (self.tp // self.ep)
        self._plain(f"{path}.gate", self.config["num_experts"], h)
        experts = self._module(f"{path}.experts")
        bf16 = self._skipped(f"{path}.experts")
        experts.quant_method = method("UnquantizedFusedMoEMethod" if bf16 else "Fp8MoEMethod", runner=Runner(self.moe_backend))
        for name, rows, columns in (("w13", 2 * ffn, h), ("w2", h, ffn)):
            values = torch.randn(e, rows, columns).to(torch.bfloat16 if bf16 else torch.float8_e4m3fn)
            self._add(f"{path}.experts.{name}_weight", values)
            if not bf16:
                grid = (e, 2 * blocks(ffn) if name == "w13" else blocks(rows), blocks(columns))
                self._add(f"{path}.experts.{name}_weight_scale_inv", torch.ones(grid))

    def held(self, name: str) -> torch.Tensor:
        """Of the only rank: the Hugging Face tensor `name`, or its scale."""
        parameters, ffn = dict(self.named_parameters()), self.config.get("moe_intermediate_size", 0)
        path, leaf = name.rsplit(".", 1)
        owner, _, matrix = path.rpartition(".")
        unit = 128 if leaf == "weight_scale_inv" else 1
        if ".mlp.experts." in path:
            at, expert = owner.rsplit(".", 1)
            mine = parameters[f"{at}.{'w2' if matrix == 'down_proj' else 'w13'}_{leaf}"][int(expert)]
            half = blocks(ffn) if unit == 128 else ffn
            return {"gate_proj": mine[:half], "up_proj": mine[half:], "down_proj": mine}[matrix]
        for fused, shards in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if matrix in shards:
                sizes = [-(-size // unit) for size in self.sizes[fused]]
                return parameters[f"{owner}.{fused}.{leaf}"].split(sizes)[shards.index(matrix)]
        whole = parameters[name]
        return whole[: self.config["vocab_size"]] if path in ("model.embed_tokens", "lm_head") else whole
