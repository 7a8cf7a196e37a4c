"""Which tensors an engine holds in which format: one table over Hugging Face names, computed on both sides.

Trainer and engine each build the table from the same configuration and compare digests before the first
byte moves. Pure Python.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from dataclasses import dataclass

from trt_rl.arch import Arch
from trt_rl.errors import RefitError

BLOCK = 128  # rows and columns that share one scale in fp8_block
FORMATS = ("bf16", "fp8_block")

# Kept in BF16 whatever the format: the list ModelOpt and TensorRT-LLM exclude, over HF names.
_ALWAYS_BF16 = ("model.embed_tokens.*", "lm_head.*", "*norm.weight", "*.mlp.gate.weight")


@dataclass(frozen=True)
class PrecisionTable:
    """`formats` maps every HF tensor name to `bf16` or `fp8_block`."""

    formats: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def build(cls, arch: Arch, format: str, exclude: tuple[str, ...] = ()) -> PrecisionTable:
        """Apply `format` to every linear weight of `arch` except those that match a pattern in `exclude`.

        Raises:
            RefitError: the format is unknown, or a pattern matches no tensor.
        """
        if format not in FORMATS:
            raise RefitError(f"refit.format is {format!r}; known formats: {', '.join(FORMATS)}")
        shapes = arch.hf_shapes()
        for pattern in exclude:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
                raise RefitError(f"refit.exclude: {pattern!r} matches no tensor; names look like {list(shapes)[2]!r}")
        kept = _ALWAYS_BF16 + tuple(exclude)
        formats = {name: "bf16" if any(fnmatch.fnmatchcase(name, p) for p in kept) else format for name in shapes}
        for layer in arch.moe_layers:
            at = f"model.layers.{layer}.mlp.experts."
            if len({f for name, f in formats.items() if name.startswith(at)}) > 1:
                raise RefitError(f"refit.exclude splits the experts of layer {layer}; engines fuse them: exclude all ({at}*) or none")
        return cls(formats, shapes)

    def wire_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Every tensor that travels: name -> (dtype, shape). FP8 weights bring their `_scale_inv`."""
        tensors = {}
        for name, shape in self.shapes.items():
            if self.formats[name] == "bf16":
                tensors[name] = ("bfloat16", shape)
            else:
                tensors[name] = ("float8_e4m3fn", shape)
                tensors[scale_name(name)] = ("float32", grid(shape))
        return tensors

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.formats, self.shapes], sort_keys=True).encode()).hexdigest()[:16]

    def summary(self) -> str:
        counts = {f: sum(1 for v in self.formats.values() if v == f) for f in sorted(set(self.formats.values()))}
        return ", ".join(f"{n} tensors {f}" for f, n in counts.items()) + f" (table {self.digest})"


def scale_name(name: str) -> str:
    """DeepSeek's name of a block scale: the factor that multiplies the stored FP8 value."""
    return name.removesuffix("weight") + "weight_scale_inv"


def grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of blocks in each dimension; the last block of a dimension may be partial."""
    return tuple(-(-n // BLOCK) for n in shape)
