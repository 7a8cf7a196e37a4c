"""Which tensors an engine holds in which format: one table over Hugging Face names, computed on both sides.

Trainer and engine each build the table from the same configuration and compare digests before the first
byte moves. The same table is written as ModelOpt's `hf_quant_config.json` and as the `quantization_config` that
TensorRT-LLM and vLLM read. Pure Python.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trt_rl
from trt_rl.arch import Arch
from trt_rl.errors import RefitError

BLOCK = 128  # rows and columns that share one scale in fp8_block
FORMATS = ("bf16", "fp8_block", "fp8_per_tensor")

# Kept in BF16 whatever the format: the list ModelOpt and TensorRT-LLM exclude, over HF names.
_ALWAYS_BF16 = ("model.embed_tokens.*", "lm_head.*", "*norm.weight", "*.mlp.gate.weight")
# Matrices that engines keep in one tensor, which has one format.
_FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


@dataclass(frozen=True)
class PrecisionPolicy:
    """What the user asked for; the table follows from it and the model."""

    format: str = "fp8_block"
    exclude: tuple[str, ...] = ()
    """ModelOpt wildcard patterns over HF module or tensor names that stay BF16."""
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0
    bf16_attention: bool = False

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PrecisionPolicy:
        """The policy that `dataclasses.asdict` made `fields` of, perhaps by way of JSON."""
        return cls(**fields | {"exclude": tuple(fields["exclude"])})

    def patterns(self, layers: int) -> tuple[str, ...]:
        """Everything that stays BF16 besides what always does."""
        kept = list(self.exclude)
        kept += [f"model.layers.{i}.*" for i in range(layers) if i < self.bf16_first_layers or i >= layers - self.bf16_last_layers]
        if self.bf16_attention:
            kept.append("*.self_attn.*")
        return tuple(kept)


@dataclass(frozen=True)
class PrecisionTable:
    """`formats` maps every HF tensor name to one of `FORMATS`."""

    policy: PrecisionPolicy
    formats: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def build(cls, arch: Arch, policy: PrecisionPolicy) -> PrecisionTable:
        """Apply the policy's format to every linear weight of `arch` except what stays BF16.

        Raises:
            RefitError: the format is unknown, a pattern matches no tensor, or a pattern splits what engines fuse.
        """
        if policy.format not in FORMATS:
            raise RefitError(f"refit.format is {policy.format!r}; known formats: {', '.join(FORMATS)}")
        shapes = arch.hf_shapes()
        for pattern in policy.exclude:
            if not any(map(_matcher((pattern,)), shapes)):
                raise RefitError(f"refit.exclude: {pattern!r} matches no tensor; names look like {list(shapes)[2]!r}")
        stays = _matcher(_ALWAYS_BF16 + policy.patterns(arch.layers))
        formats = {name: "bf16" if stays(name) else policy.format for name in shapes}
        of_experts: dict[str, set[str]] = {}
        for name, format in formats.items():
            if ".experts." in name:
                of_experts.setdefault(name.split("mlp.experts.")[0], set()).add(format)
        for layer in range(arch.layers):
            at = f"model.layers.{layer}."
            for group in _FUSED:
                if len({formats[n] for m in group if (n := f"{at}{m}.weight") in formats}) > 1:
                    raise RefitError(f"refit.exclude splits {', '.join(group)} of layer {layer}; engines fuse them: exclude all or none")
            if len(of_experts.get(at, ())) > 1:
                raise RefitError(
                    f"refit.exclude splits the experts of layer {layer}; engines fuse them: exclude all ({at}mlp.experts.*) or none"
                )
        return cls(policy, formats, shapes)

    @property
    def format(self) -> str:
        """Of weights that do not stay BF16."""
        return self.policy.format

    def scales(self, name: str) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the FP32 scales that travel with weight `name`."""
        if self.formats[name] == "fp8_block":
            return {scale_name(name): grid(self.shapes[name])}
        if self.formats[name] == "fp8_per_tensor":
            return {per_tensor_scale(name): (1,), input_scale(name): (1,)}
        return {}

    def wire_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Every tensor that travels: name -> (dtype, shape). FP8 weights bring their scales."""
        tensors = {}
        for name, shape in self.shapes.items():
            tensors[name] = ("bfloat16" if self.formats[name] == "bf16" else "float8_e4m3fn", shape)
            tensors |= {scale: ("float32", its_shape) for scale, its_shape in self.scales(name).items()}
        return tensors

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.formats, self.shapes], sort_keys=True).encode()).hexdigest()[:16]

    def summary(self) -> str:
        counts = {f: sum(1 for v in self.formats.values() if v == f) for f in sorted(set(self.formats.values()))}
        return ", ".join(f"{n} tensors {f}" for f, n in counts.items()) + f" (table {self.digest})"

    def bf16_modules(self) -> list[str]:
        """Linear modules that stay BF16, by name; those of one layer's experts as one."""
        found = [n.removesuffix(".weight") for n, f in self.formats.items() if f == "bf16" and len(self.shapes[n]) == 2]
        names = dict.fromkeys(n.split(".experts.")[0] + ".experts" if ".experts." in n else n for n in found)
        return [n for n in names if n != "model.embed_tokens"]

    def hf_quant_config(self) -> dict[str, Any]:
        """The content of `hf_quant_config.json` in ModelOpt's layout (modelopt/torch/export/quant_utils.py)."""
        algorithm = {"bf16": None, "fp8_block": "FP8_PB_WO", "fp8_per_tensor": "FP8"}[self.format]
        quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": self.bf16_modules()}
        if self.format == "fp8_block":
            quantization["group_size"] = BLOCK
        return {"producer": {"name": "trt_rl", "version": trt_rl.__version__}, "quantization": quantization}

    def quantization_config(self) -> dict[str, Any] | None:
        """`quantization_config` of a Hugging Face config.json, as TensorRT-LLM and vLLM read it; None for BF16."""
        if self.format == "bf16":
            return None
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": self.bf16_modules()}
        if self.format == "fp8_block":
            return config | {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        return config | {"activation_scheme": "static"}


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a tensor's name, or its module's, matches one of the wildcard patterns."""
    match = re.compile("|".join(map(fnmatch.translate, patterns))).match
    return lambda name: bool(match(name) or match(name.removesuffix(".weight")))


def scale_name(name: str) -> str:
    """DeepSeek's name of a block scale: the factor that multiplies the stored FP8 value."""
    return name.removesuffix("weight") + "weight_scale_inv"


def per_tensor_scale(name: str) -> str:
    """ModelOpt's name of a per-tensor scale: the factor that multiplies the stored FP8 value."""
    return name.removesuffix("weight") + "weight_scale"


def input_scale(name: str) -> str:
    """ModelOpt's name of the calibrated scale of a linear layer's input."""
    return name.removesuffix("weight") + "input_scale"


def grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of blocks in each dimension; the last block of a dimension may be partial."""
    return tuple(-(-n // BLOCK) for n in shape)
