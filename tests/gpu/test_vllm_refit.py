"""A refit into a live vLLM engine gives every parameter the bits that vLLM itself loads from the exported checkpoint."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.models import write_model
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.precision import PrecisionPolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(500),
]
SIZES = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=1024,
    num_hidden_layers=2,
    max_position_embeddings=1024,
)
PROMPTS = [[5, 6, 7, 8, 9], [100, 200, 300], [11] * 40]


@pytest.mark.parametrize("format", ["fp8_block", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_live_parameters_equal_vllms_own_loading(tmp_path, kind, format):
    from trt_rl.bench.vllm import VllmProcess, VllmRefit, VllmSetup
    from trt_rl.refit.export import export

    extra = {"moe_intermediate_size": 256} if kind == "moe" else {}
    folder = write_model(tmp_path / "model", kind, dtype=torch.bfloat16, **SIZES, **extra)
    policy, layout = PrecisionPolicy(format), EngineLayout()
    exported = tmp_path / "exported"
    export(folder, exported, policy)
    small = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 28}

    own = VllmProcess(VllmSetup(str(exported), layout, policy, "auto", options=small))
    try:
        own.finish("start")
        expected, said = own.call("rpc", "trt_rl_checksums")[0], own.call("generate", PROMPTS, 12)
    finally:
        own.close()

    with VllmRefit(VllmSetup(str(folder), layout, policy, options=small), Layout(), "ipc", 400_000, str(folder)) as linked:
        for version in range(2):
            report = linked.refit(version)
        found = linked.engine.call("rpc", "trt_rl_checksums")[0]
        now = linked.engine.call("generate", PROMPTS, 12)
    assert report["verified_slices"] > 0
    assert found == expected, [n for n in expected if found.get(n) != expected[n]]
    assert [tokens for tokens, _ in now] == [tokens for tokens, _ in said]
    assert [logprobs for _, logprobs in now] == [logprobs for _, logprobs in said]
