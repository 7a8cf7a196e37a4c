"""What only vLLM's adapter promises; the rest is in `test_engine_contract.py`."""

from __future__ import annotations

import asyncio
import importlib.util
import time

import psutil
import pytest
import torch

from tests.contracts.conftest import OPTIONS
from tests.support.refits import refit_engine
from tests.support.trtllm import Background
from trt_rl.arch import Arch
from trt_rl.errors import EngineError, EngineLost
from trt_rl.layout import EngineLayout
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.rollout.engine import Request, Sampling, make_engine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `tests/run.sh --vllm` installs a CPU build"
)


def start(folder, sleep=False):
    arch = Arch.load(folder)
    table = PrecisionTable.build(arch, PrecisionPolicy("bf16"))
    engine = make_engine("vllm", str(folder), arch, table, EngineLayout(), OPTIONS["vllm"] | {"sleep": sleep})
    engine.start()
    return engine


def cores() -> set[psutil.Process]:
    return {p for p in psutil.Process().children() if "EngineCore" in " ".join([p.name(), *p.cmdline()])}


def test_a_killed_engine_process_ends_waiting_requests(folder):
    others = cores()  # of the contract's own engine
    engine = start(folder)
    (mine,) = cores() - others
    refit_engine(engine, folder, 0)
    waiting = Background(engine, Request("long", (3, 4, 5), Sampling(max_tokens=500)))
    time.sleep(1.0)
    mine.kill()
    found = waiting.finish()
    assert isinstance(found, EngineLost) and "vLLM's engine process ended" in str(found)
    with pytest.raises(EngineLost):
        asyncio.run(engine.generate(Request("later", (3, 4), Sampling(max_tokens=2))))
    engine.stop()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's CPU build cannot sleep")
def test_sleep_gives_memory_back(folder):
    engine = start(folder, sleep=True)
    refit_engine(engine, folder, 0)
    (before,) = asyncio.run(engine.generate_many([Request("a", (3, 4, 5), Sampling(max_tokens=8, temperature=0.0))]))
    awake = torch.cuda.mem_get_info()[0]
    engine.pause("drain")
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - awake > 2**30, "less than a GiB came back"
    with pytest.raises(EngineError, match="asleep"):
        asyncio.run(engine.generate(Request("b", (3, 4), Sampling(max_tokens=2))))
    engine.wake("weights")
    refit_engine(engine, folder, 1)
    engine.wake("kv_cache")
    engine.resume()
    (after,) = asyncio.run(engine.generate_many([Request("c", (3, 4, 5), Sampling(max_tokens=8, temperature=0.0))]))
    assert after.tokens == before.tokens and set(after.versions) == {1}
    engine.stop()
