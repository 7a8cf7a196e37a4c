"""Write a Hugging Face folder in the format an engine serves: FP8 weights, scales, and the configuration that says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from trt_rl.arch import Arch
from trt_rl.errors import RecipeError, RefitError
from trt_rl.refit.hf_files import HFFolder, write_folder
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable, scale_name
from trt_rl.refit.quantize import quantize_blocks


def export(model: Path, target: Path, policy: PrecisionPolicy) -> PrecisionTable:
    """Quantize the checkpoint in `model` into the new folder `target`, one tensor at a time.

    The bits are those that a refit brings. `fp8_per_tensor` needs activations to calibrate and is written by a run.

    Raises:
        RecipeError: `target` exists, or the format cannot be made from weights alone.
        ModelError: `model` is damaged.
        RefitError: a weight holds NaN or Inf; nothing is left behind.
    """
    if target.exists():
        raise RecipeError(f"{target} exists; export writes a new folder")
    if policy.format == "fp8_per_tensor":
        raise RecipeError("export --precision fp8_per_tensor needs calibrated activations; use fp8_block or bf16")
    arch = Arch.load(model)
    table, files = PrecisionTable.build(arch, policy), HFFolder(model, arch)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_folder(partial, _tensors(files, table))
        _write_configuration(model, partial, table)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)
    return table


def _tensors(files: HFFolder, table: PrecisionTable) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in table.shapes.items():
        box = tuple((0, n) for n in shape)
        weight = files.read(name, box).to(torch.bfloat16)
        if not torch.isfinite(weight).all():
            raise RefitError(f"{name}: the checkpoint holds NaN or Inf; the export is refused")
        if table.formats[name] == "bf16":
            yield name, weight
        else:
            values, scales = quantize_blocks(box, weight)
            yield name, values
            yield scale_name(name), scales


def _write_configuration(model: Path, target: Path, table: PrecisionTable) -> None:
    for file in (*model.glob("*.json"), *model.glob("*.jinja"), *model.glob("*.txt"), *model.glob("*.model")):
        if not file.name.startswith("model.safetensors") and file.name != "hf_quant_config.json":
            shutil.copy(file, target)
    config = json.loads((model / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    config.pop("quantization_config", None)
    if (quantization := table.quantization_config()) is not None:
        config["quantization_config"] = quantization
        (target / "hf_quant_config.json").write_text(json.dumps(table.hf_quant_config(), indent=1) + "\n")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
