"""Engines that can run here, each started once and given weights by a refit."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import write_model
from tests.support.refits import refit_engine
from tests.support.trtllm import FAMILIES, REAL, RemoteEngine
from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.rollout.engine import make_engine

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128, vocab_size=512, num_hidden_layers=2,
    max_position_embeddings=512,
)  # fmt: skip
OPTIONS = {
    "hf": {},
    "vllm": {"enforce_eager": True, "max_num_seqs": 64, "block_size": 32, "enable_prefix_caching": True}
    | ({} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 1 << 28}),
    "sglang": {"attention_backend": "triton", "disable_cuda_graph": True, "mem_fraction_static": 0.3, "max_running_requests": 64},
}
NEEDS = {"hf": "transformers", "vllm": "vllm", "sglang": "sglang"}
INSTALL = {
    "vllm": "`tests/run.sh --vllm` installs a CPU build of it in an environment of its own",
    "sglang": "it needs a GPU; `tests/run.sh --engines` tests the adapter with an imitation",
}
TRTLLM = {"trtllm-1.2.1": 1, "trtllm-1.3.0rc15": 2, "trtllm-1.3.0rc29": 1, "trtllm-1.4.0rc1": 2}
"""Release of the contract fake -> tensor parallelism. Where TensorRT-LLM is installed, that one is meant by the first of them."""
FLOOR = "1.3.0rc15"


def pytest_addoption(parser):
    parser.addoption("--all-engines", action="store_true", help="test every imitated release and engine, not TensorRT-LLM's floor alone")


def pytest_collection_modifyitems(config, items):
    """Leave out, unless asked for, other releases than the floor, SGLang's imitation, and tests of the imitations themselves: an
    engine takes seconds to start, and CI has 25 minutes."""
    if config.getoption("--all-engines", default=False):
        return
    skip = pytest.mark.skip(reason="runs with `tests/run.sh --engines`")
    for item in items:
        values = map(str, item.callspec.params.values()) if hasattr(item, "callspec") else ()
        names = {value.removeprefix("trtllm-") for value in values} & set(FAMILIES)
        other = item.path.name in ("test_engine_contract.py", "test_trtllm.py") and names - {FLOOR}
        if other or item.path.name in ("test_sglang.py", "test_trtllm_fake.py") or item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = write_model(tmp_path_factory.mktemp("contract") / "dense", "dense", torch.bfloat16, **SIZES)
    tensors = load_file(made / "model.safetensors")
    # Weights of a trained model's size: larger ones would amplify BF16 rounding beyond what a contract can ask for.
    smaller = {name: tensor * 0.4 if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    save_file(smaller, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="session", params=["hf", "vllm", "sglang", *(pytest.param(name, marks=pytest.mark.trtllm) for name in TRTLLM)])
def engine(request, folder):
    """A started engine that serves version 0 of the checkpoint in BF16."""
    name = request.param
    if name in TRTLLM:
        if REAL and name != next(iter(TRTLLM)):
            pytest.skip("the installed TensorRT-LLM is of one release")
        started = RemoteEngine(folder, "bf16", tp=TRTLLM[name], version=name.removeprefix("trtllm-"), max_batch_size=64)
        started.start()
        refit_engine(started, folder, 0)
        yield started
        started.close()
        return
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{name} is not installed here; {INSTALL[name]}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    arch = Arch.load(folder)
    started = make_engine(name, str(folder), arch, PrecisionTable.build(arch, PrecisionPolicy("bf16")), EngineLayout(), OPTIONS[name])
    started.start()
    refit_engine(started, folder, 0)
    yield started
    started.stop()
