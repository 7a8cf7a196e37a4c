"""Where TensorRT-LLM keeps what: its live parameters under the names of a refit, to compare them with what was loaded.

Parameter names and orders are of TensorRT-LLM's PyTorch backend (tensorrt_llm/_torch/modules: linear.py, embedding.py,
fused_moe/quantization.py), for Hopper, where weights stay as they were loaded. Needs torch only.
"""

from __future__ import annotations

from functools import partial

import torch

from trt_rl.arch import Arch
from trt_rl.errors import RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.engine_shards import wanted
from trt_rl.refit.landing import Place
from trt_rl.refit.names import Box
from trt_rl.refit.precision import PrecisionTable, scale_name
from trt_rl.refit.route import owned_blocks
from trt_rl.rollout.live import EXPERT, FUSED, parameter_of

_parameter = partial(parameter_of, "TensorRT-LLM")


def live_places(
    parameters: dict[str, torch.Tensor], arch: Arch, table: PrecisionTable, layout: EngineLayout, rank: int
) -> dict[str, Place]:
    """Views of one rank's live parameters: wire name -> place.

    Args:
        parameters: `model.named_parameters()`.
        layout: of the engine, one replica.
        rank: inside the replica.

    Raises:
        RefitError: a tensor has no place, or one of another type or shape than the precision table and layout say.
    """
    boxes = {name: _box(name, shape, arch, layout, rank) for name, shape in table.shapes.items()}
    found: dict[str, Place] = {}
    for name, box in boxes.items():
        if box is None:
            continue
        fp8 = table.formats[name] != "bf16"
        view = _view(name, box, boxes, parameters, arch, layout, scale=False)
        found[name] = Place(box, _checked(name, view, box, torch.float8_e4m3fn if fp8 else torch.bfloat16))
        if fp8:
            blocks = owned_blocks(box)
            view = _view(name, box, boxes, parameters, arch, layout, scale=True)
            found[scale_name(name)] = Place(blocks, _checked(scale_name(name), view, blocks, torch.float32))
    return found


def _box(name: str, shape: tuple[int, ...], arch: Arch, layout: EngineLayout, rank: int) -> Box | None:
    if name in ("model.embed_tokens.weight", "lm_head.weight"):  # cut without padding to 64 rows first
        rows = -(-arch.vocab // layout.tp)
        start, stop = rank * rows, min((rank + 1) * rows, arch.vocab)
        return ((start, stop), (0, shape[1])) if start < stop else None
    return wanted(name, shape, arch, layout, layout.at(rank))


def _view(name: str, box: Box, boxes: dict, parameters: dict, arch: Arch, layout: EngineLayout, scale: bool) -> torch.Tensor:
    """The part of a live parameter that holds `box` of tensor `name`, or the block scales of it."""
    module = name.removesuffix(".weight")
    unit = 128 if scale else 1
    rows = -(-(box[0][1] - box[0][0]) // unit)
    if match := EXPERT.fullmatch(name):
        kind = "w2" if match[3] == "down" else "w3_w1"
        leaf = f"{kind}_weight_scaling_factor" if scale else f"{kind}_weight"
        target = next((p for p in (f"{match[1]}.{leaf}", f"{match[1]}.backend.{leaf}") if p in parameters), None)
        whole = _parameter(target or f"{match[1]}.{leaf}", name, parameters)
        mine = whole[int(match[2]) % (arch.experts // layout.ep)]
        start = rows if match[3] == "gate" else 0  # w3 is up and comes first
        return mine[start : start + rows]
    leaf = "weight_scale" if scale else "weight"
    owner, _, matrix = module.rpartition(".")
    if matrix not in FUSED:
        return _parameter(f"{module}.{leaf}", name, parameters)[:rows]
    fused, before = FUSED[matrix]
    start = sum(-(-(boxes[f"{owner}.{b}.weight"][0][1] - boxes[f"{owner}.{b}.weight"][0][0]) // unit) for b in before)
    return _parameter(f"{owner}.{fused}.{leaf}", name, parameters)[start : start + rows]


def _checked(name: str, view: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    shape = [stop - start for start, stop in box]
    if view.dtype != dtype or list(view.shape) != shape:
        raise RefitError(
            f"{name}: TensorRT-LLM holds {str(view.dtype).removeprefix('torch.')}{list(view.shape)} where precision table and layout "
            f"make it {str(dtype).removeprefix('torch.')}{shape}"
        )
    return view
