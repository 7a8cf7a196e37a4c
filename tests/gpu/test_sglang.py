"""SGLang itself behind the adapter: a refit gives every live parameter the bits that SGLang loads from the exported checkpoint.

Options keep to what a machine without FlashAttention 3 can run: Triton attention, no CUDA graphs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time

import psutil
import pytest
import torch

from tests.support.models import hf_logits, write_model
from tests.support.refits import connect, move, refit_engine
from tests.support.trtllm import Background
from trt_rl.arch import Arch
from trt_rl.errors import EngineLost
from trt_rl.layout import EngineLayout
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.rollout.engine import Request, Sampling, make_engine
from trt_rl.rollout.sglang import SglangEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
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
OPTIONS = {"attention_backend": "triton", "disable_cuda_graph": True, "mem_fraction_static": 0.3, "max_running_requests": 64}
PROMPTS = [(5, 6, 7, 8, 9), (100, 200, 300), (11,) * 40]


class Loading(SglangEngine):
    """SGLang with the weights that it loads from the folder by itself."""

    def engine_args(self):
        return super().engine_args() | {"load_format": "auto", "json_model_override_args": "{}"}


def generate(engine, **sampling) -> list:
    requests = [Request(f"r{i}", p, Sampling(**({"max_tokens": 12} | sampling))) for i, p in enumerate(PROMPTS)]
    return asyncio.run(engine.generate_many(requests))


def checksums(engine) -> dict[str, str]:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    success, message, ranks, _ = engine._wait(engine._manager.check_weights(CheckWeightsReqInput(action="checksum"), None))
    assert success, message
    return ranks[0]["checksums"]


@pytest.mark.parametrize("format", ["fp8_block", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_live_parameters_equal_sglangs_own_loading(tmp_path, kind, format):
    from trt_rl.refit.export import export

    extra = {"moe_intermediate_size": 256} if kind == "moe" else {}
    folder, exported = write_model(tmp_path / "model", kind, dtype=torch.bfloat16, **SIZES, **extra), tmp_path / "exported"
    export(folder, exported, PrecisionPolicy(format))
    arch = Arch.load(folder)
    table = PrecisionTable.build(arch, PrecisionPolicy(format))

    own = Loading(str(exported), arch, table, EngineLayout(), **OPTIONS)
    own.start()
    try:
        own.version, own.poisoned = 0, None
        expected, said = checksums(own), generate(own, temperature=0.0)
    finally:
        own.stop()

    engine = make_engine("sglang", str(folder), arch, table, EngineLayout(), OPTIONS | {"sleep": True})
    engine.start()
    try:
        refit_engine(engine, folder, 0)
        found, now = checksums(engine), generate(engine, temperature=0.0)
        assert found == expected, [n for n in expected if found.get(n) != expected[n]]
        assert [d.tokens for d in now] == [d.tokens for d in said]
        assert [d.logprobs for d in now] == [d.logprobs for d in said]
        if format == "bf16":
            check_logprobs(engine, folder)
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - awake > 2**30, "less than a GiB came back"
        engine.wake("weights")
        trainer = connect(engine, folder)
        move(trainer, engine, 1)
        engine.wake("kv_cache")
        engine.commit_refit(1)
        engine.disconnect_refit()
        trainer.close()
        assert checksums(engine) == expected, "after sleeping"
        assert [d.tokens for d in generate(engine, temperature=0.0)] == [d.tokens for d in said]
    finally:
        engine.stop()


def test_a_killed_scheduler_ends_waiting_requests(tmp_path):
    folder = write_model(tmp_path / "model", "dense", dtype=torch.bfloat16, **SIZES)
    arch = Arch.load(folder)
    engine = make_engine("sglang", str(folder), arch, PrecisionTable.build(arch, PrecisionPolicy("bf16")), EngineLayout(), OPTIONS)
    engine.start()
    refit_engine(engine, folder, 0)
    waiting = Background(engine, Request("long", (3, 4, 5), Sampling(max_tokens=1000)))
    time.sleep(1.0)
    (scheduler,) = [p for p in psutil.Process().children() if "scheduler" in " ".join([p.name(), *p.cmdline()])]
    scheduler.kill()
    found = waiting.finish()
    assert isinstance(found, EngineLost) and f"SGLang's process {scheduler.pid} has ended" in str(found)
    engine.stop()


def check_logprobs(engine, folder) -> None:
    """Of sampled tokens, under the temperature that sampled; seeds repeat."""
    first, again = generate(engine, temperature=0.7, seed=3), generate(engine, temperature=0.7, seed=3)
    assert [d.tokens for d in first] == [d.tokens for d in again]
    for prompt, done in zip(PROMPTS, first, strict=True):
        logits = hf_logits(folder, torch.tensor([[*prompt, *done.tokens]]))[0].float() / 0.7
        logp = torch.log_softmax(logits, -1)
        errors = [abs(logp[len(prompt) - 1 + i, t].item() - p) for i, (t, p) in enumerate(zip(done.tokens, done.logprobs, strict=True))]
        assert sum(errors) / len(errors) <= 0.05
