"""What every engine rank must hold after a refit, computed from the checkpoint without the code under test."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout
from trt_rl.refit.precision import PrecisionTable

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def input_scales(table: PrecisionTable) -> dict[str, float]:
    """Made up, and different for every weight: a mix-up cannot go unseen."""
    return {name: 0.01 + i / 1024 for i, name in enumerate(table.shapes) if table.formats[name] == "fp8_per_tensor"}


def reference(folder: Path | str, table: PrecisionTable, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Every wire tensor, whole: BF16, or e4m3 values and FP32 scales."""
    files = {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}
    weights = {name: (files[name] * scale).bfloat16() for name in table.shapes}
    shared: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        largest = weight.float().abs().max()
        shared[_group(name)] = torch.maximum(shared.get(_group(name), largest), largest)
    expected = {}
    for name, weight in weights.items():
        if table.formats[name] == "bf16":
            expected[name] = weight
        elif table.formats[name] == "fp8_block":
            expected[name], expected[f"{name}_scale_inv"] = by_blocks(weight)
        else:
            factor = _scale(shared[_group(name)])
            expected[name] = (weight.float() / factor).to(torch.float8_e4m3fn)
            expected[f"{name}_scale"] = factor.reshape(1)
            expected[name.replace("weight", "input_scale")] = torch.tensor([input_scales(table)[name]])
    return expected


def by_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = weight.float()
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            scales[i, j] = _scale(wide[at].abs().max())
            values[at] = (wide[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def _group(name: str) -> str:
    """Weights of one group share a per-tensor scale, because engines keep them in one matrix."""
    prefix, matrix, _ = ("." + name).rsplit(".", 2)
    return f"{prefix}.{_FUSED.get(matrix, matrix)}"


def _scale(largest: torch.Tensor) -> torch.Tensor:
    scale = largest.float() / torch.tensor(448.0)
    return scale if scale >= torch.finfo(torch.float32).tiny else torch.tensor(1.0)


def engine_tensors(expected: dict[str, torch.Tensor], arch: Arch, layout: EngineLayout, rank: int) -> dict[str, torch.Tensor]:
    """The part of `expected` that engine rank `rank` holds, cut as vLLM and TensorRT-LLM cut."""
    tp_rank, parts = rank % layout.tp, {}
    for name, tensor in expected.items():
        count, part, cut = layout.tp, tp_rank, None
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            experts = torch.arange(arch.experts).chunk(layout.ep)[tp_rank % layout.ep]
            if int(expert[1]) not in experts.tolist():
                continue
            count, part = layout.tp // layout.ep, tp_rank // layout.ep
        if re.search(r"\.(q|k|v|gate|up)_proj\.weight(_scale_inv)?$", name):
            cut = 0
        elif re.search(r"\.(o|down)_proj\.weight(_scale_inv)?$", name):
            cut = 1
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = (arch.vocab + 63) // 64 * 64 // layout.tp
            tensor = tensor[tp_rank * rows : (tp_rank + 1) * rows]
        elif cut is not None:
            assert tensor.shape[cut] % count == 0, name
            tensor = tensor.chunk(count, cut)[part]
        parts[name] = tensor
    return parts


def fingerprint(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Equal only for equal bits, shapes and dtypes; small enough to leave a process."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return fingerprint(a) == fingerprint(b)
