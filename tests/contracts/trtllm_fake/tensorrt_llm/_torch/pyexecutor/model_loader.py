"""`tensorrt_llm._torch.pyexecutor.model_loader`: HF folder or dummy weights at start, `reload` afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from tensorrt_llm import _family
from tensorrt_llm._torch.distributed import Mapping
from tensorrt_llm._torch.models.modeling_qwen3 import HfWeightMapper, ModelConfig, Qwen3ForCausalLM
from tensorrt_llm._torch.virtual_memory import manager
from tensorrt_llm.logger import logger


def quant_of(folder: Path, config: Any) -> tuple[str | None, list[str]]:
    """Algorithm and excluded modules, by the package's rules: hf_quant_config.json before config.json."""
    if (file := folder / "hf_quant_config.json").exists():
        quant = json.loads(file.read_text())["quantization"]
        algo = quant.get("quant_algo")
        if algo not in (None, "FP8", "FP8_BLOCK_SCALES"):
            raise NotImplementedError(f"{algo}: the fake knows FP8 and FP8_BLOCK_SCALES only")
        return algo, list(quant.get("exclude_modules") or ())
    quant = getattr(config, "quantization_config", None)
    if quant is None:
        return None, []
    quant = quant if isinstance(quant, dict) else quant.to_dict()
    if quant.get("quant_method") == "fp8" and quant.get("weight_block_size"):
        block = tuple(quant["weight_block_size"])
        assert block == (128, 128), "FP8_BLOCK_SCALES only supports block_size=(128,128)"
        return "FP8_BLOCK_SCALES", [*(quant.get("modules_to_not_convert") or []), "*eh_proj"]
    return None, []  # fp8 without weight_block_size: no error, an unquantized model


class ModelLoader:
    def __init__(self, llm_args: Any, mapping: Mapping) -> None:
        self.llm_args, self.mapping, self.weight_mapper = llm_args, mapping, None

    def load(self, checkpoint_dir: str) -> Qwen3ForCausalLM:
        import transformers

        folder = Path(checkpoint_dir)
        config = transformers.AutoConfig.from_pretrained(folder)
        for key, value in (self.llm_args.model_kwargs or {}).items():
            if isinstance(value, dict) and isinstance(old := getattr(config, key, None), dict):
                value = old | value
            setattr(config, key, value)
        config.dtype = torch.bfloat16 if self.llm_args.dtype == "auto" and config.dtype is None else config.dtype
        if self.llm_args.dtype != "auto":
            config.dtype = getattr(torch, self.llm_args.dtype)
        model = Qwen3ForCausalLM(ModelConfig(config, self.mapping, *quant_of(folder, config))).eval()
        if self.llm_args.load_format == "auto":
            self.weight_mapper = HfWeightMapper(model)
            self._call_load_weights(model, self._read(folder))
        elif self.llm_args.load_format == "dummy":
            self.weight_mapper = HfWeightMapper(model)
            _dummy(model)
        else:
            raise NotImplementedError(f"No load support for load format: {self.llm_args.load_format}")
        for module in model.modules():
            if hasattr(module, "post_load_weights"):
                module.post_load_weights()
        return model

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise RuntimeError(f"No weight files found in {folder}.")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def reload(self, model: Qwen3ForCausalLM, weights: dict, allow_partial_loading: bool = False) -> None:
        if str(self.mapping.rank) == _family.knob("FAIL_RELOAD_RANK"):
            raise RuntimeError(f"TRTLLM_FAKE_FAIL_RELOAD_RANK: rank {self.mapping.rank} does not load {next(iter(weights), None)}")
        if self.weight_mapper is None:
            raise ValueError("weight_mapper is None: the model was not loaded")
        manager.require("model", "model_weights")
        self._call_load_weights(model, weights, allow_partial_loading)

    if _family.LIFECYCLE:

        def begin_update_weights(self) -> None:
            self.weight_mapper.begin_update_weights()

        def finalize_update_weights(self) -> None:
            self.weight_mapper.finalize_update_weights()

        def abort_update_weights(self) -> None:
            self.weight_mapper.abort_update_weights()

    def _call_load_weights(self, model: Qwen3ForCausalLM, weights: dict, allow_partial_loading: bool = False) -> None:
        model.load_weights(weights, self.weight_mapper, allow_partial_loading=allow_partial_loading)


def _dummy(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        if value.dtype == torch.float8_e4m3fn:
            value.data.copy_((torch.rand(value.shape, generator=generator) - 0.5).to(value.dtype))
        elif "norm" in name or value.dim() == 0:
            continue
        else:
            value.data.uniform_(-1e-3, 1e-3, generator=generator)
    logger.info("dummy weights")
