"""The stand-in for TensorRT-LLM: what each release has, and how quantized weights are loaded; without engines."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.contracts.trtllm_fake.support import (
    SIZES,
    fp8,
    imported,
    in_release,
    widened,
)
from tests.support.models import write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("trtllm")
    made = {}
    for kind in ("dense", "moe", "moe32"):  # experts are loaded as bits: an FP32 engine needs an FP32 folder
        dtype, extra = torch.float32 if kind == "moe32" else torch.bfloat16, {} if kind == "dense" else dict(moe_intermediate_size=256)
        made[kind] = write_model(root / kind, kind.removesuffix("32"), dtype, **SIZES, **extra)
        file = made[kind] / "model.safetensors"
        save_file({n: t * 0.5 if t.dim() == 2 else t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return made


PROBE = """
import inspect, importlib, json
from tensorrt_llm import AsyncLLM, SamplingParams
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from tensorrt_llm._torch.modules.linear import FP8BlockScalesLinearMethod as F, UnquantizedLinearMethod as U
def there(module):
    try:
        return bool(importlib.import_module(module))
    except ModuleNotFoundError:
        return False
print(json.dumps([
    "enable_sleep" in TorchLlmArgs.model_fields, "sleep_config" in TorchLlmArgs.model_fields, hasattr(AsyncLLM, "pause_generation"),
    "target_ranks" in inspect.signature(AsyncLLM.collective_rpc).parameters, issubclass(F, U), there("tensorrt_llm._ray_utils"),
    there("tensorrt_llm.executor.ray.utils"), hasattr(WorkerExtension, "finalize_weight_update"), hasattr(AsyncLLM, "get_memory_status"),
    "logprobs_mode" in inspect.signature(SamplingParams).parameters]))
"""


RELEASES = {
    "1.2.1": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    "1.3.0rc15": [0, 1, 1, 1, 1, 1, 0, 0, 0, 1],
    "1.3.0rc29": [0, 1, 1, 1, 1, 1, 0, 1, 0, 1],
    "1.4.0rc1": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1],
}


def test_releases_have_what_they_have():
    with ThreadPoolExecutor() as pool:
        found = dict(zip(RELEASES, pool.map(lambda version: json.loads(in_release(version, PROBE)), RELEASES), strict=True))
    assert found == {version: [bool(x) for x in expected] for version, expected in RELEASES.items()}


# --- loading, without processes ----------------------------------------------------------------------------------------


def test_a_quantized_folder_loads_by_its_names(folders, tmp_path):
    """An exported checkpoint: hf_quant_config.json names the algorithm, the scales lie beside the weights."""
    imported()
    from tensorrt_llm._torch.distributed import Mapping
    from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    tensors = fp8(load_file(folders["moe"] / "model.safetensors"))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["moe"] / "config.json").read_text())
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8_BLOCK_SCALES", "exclude_modules": ["model.layers.0.*", "lm_head"]}})
    )
    plain = {n: t for n, t in widened(tensors).items() if ".layers.0." in n}
    save_file({n: t for n, t in tensors.items() if ".layers.0." not in n} | plain, tmp_path / "model.safetensors")
    for rank in range(2):
        mapping = Mapping(2, rank, 2, moe_ep_size=2)
        model = ModelLoader(TorchLlmArgs(model="x", tensor_parallel_size=2), mapping).load(str(tmp_path))
        assert model.model.layers[0].self_attn.qkv_proj.weight.dtype == torch.bfloat16
        attention, name = model.model.layers[1].self_attn, "model.layers.1.self_attn.k_proj.weight"
        q = 2 * 128
        assert torch.equal(attention.qkv_proj.weight[q : q + 128].view(torch.uint8), tensors[name][rank * 128 :][:128].view(torch.uint8))
        assert torch.equal(attention.qkv_proj.weight_scale[2:3], tensors[name + "_scale_inv"][rank : rank + 1])
        experts, at = model.model.layers[1].mlp.experts, f"model.layers.1.mlp.experts.{2 * rank + 1}"
        assert torch.equal(experts.w3_w1_weight[1, :256].view(torch.uint8), tensors[f"{at}.up_proj.weight"].view(torch.uint8))
        assert torch.equal(experts.w3_w1_weight_scaling_factor[1, 2:], tensors[f"{at}.gate_proj.weight_scale_inv"])


def test_per_tensor_fp8_requantizes_and_cannot_be_refitted_twice_without_input_scales():
    imported()
    from tensorrt_llm._torch.distributed import Mapping
    from tensorrt_llm._torch.modules.linear import Linear, TensorParallelMode, WeightMode

    mode = (TensorParallelMode.COLUMN, WeightMode.FUSED_GATE_UP_LINEAR, (64, 64), "FP8")
    linear = Linear(32, 128, torch.bfloat16, Mapping(), *mode)
    weight = torch.randn(64, 32).to(torch.float8_e4m3fn)
    gate, up = {"weight": weight, "weight_scale": torch.tensor(0.5)}, {"weight": weight, "weight_scale": torch.tensor(1.0)}
    linear.load_weights([gate, {}], allow_partial_loading=True)
    linear.load_weights([{}, up], allow_partial_loading=True)
    linear.process_weights_after_loading()
    assert linear.weight_scale == 1.0 and linear.input_scale is None
    assert torch.equal(linear.weight[:64].float(), (weight.bfloat16() * 0.5).to(torch.float8_e4m3fn).float())
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'device'"):
        linear.load_weights([gate, up], allow_partial_loading=True)
    whole = Linear(32, 128, torch.bfloat16, Mapping(), *mode)
    with pytest.raises(AssertionError):
        whole.load_weights([gate, {}])


OLD = """
import torch
from tensorrt_llm._torch.distributed import Mapping
from tensorrt_llm._torch.modules.linear import Linear
try:
    Linear(128, 128, torch.bfloat16, Mapping(), quant_algo="FP8_BLOCK_SCALES").load_weights([{}], allow_partial_loading=True)
except AssertionError as error:
    print(error)
"""


def test_1_2_loads_fp8_only_whole():
    assert "only supported for unquantized linear methods" in in_release("1.2.1", OLD)
