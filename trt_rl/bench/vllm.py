"""Refits into a real vLLM engine: trainer ranks in processes of their own, vLLM in another, on shared or separate GPUs."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.bench.party import Parties, Setup
from trt_rl.errors import WorkerFailed
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.member import Agreement
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.refit.transports.link import Meeting

ENVIRONMENT = {
    # Start without network, compiler runs or autotuning; DeepGEMM and FlashInfer would also rearrange weights.
    "VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0", "VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}  # fmt: skip


@dataclass(frozen=True)
class VllmSetup:
    folder: str
    layout: EngineLayout
    policy: PrecisionPolicy
    load_format: str = "dummy"
    linear_backend: str = "triton"
    gpus: str = "0"
    """Comma-separated, counted among those this process may see."""
    options: dict[str, Any] = field(default_factory=dict)


class VllmProcess:
    """vLLM in a process of its own; calls go through a pipe."""

    def __init__(self, setup: VllmSetup, wait_s: float = 400.0) -> None:
        self.wait_s = wait_s
        context = mp.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, setup))
        self.process.start()

    def begin(self, name: str, *args: Any) -> None:
        self.pipe.send((name, args))

    def finish(self, name: str) -> Any:
        if not self.pipe.poll(self.wait_s):
            raise WorkerFailed(f"vLLM did not finish {name} within {self.wait_s:.0f} s (alive: {self.process.is_alive()})")
        ok, value = self.pipe.recv()
        if not ok:
            raise WorkerFailed(f"vLLM failed in {name}:\n{value}")
        return value

    def call(self, name: str, *args: Any) -> Any:
        self.begin(name, *args)
        return self.finish(name)

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()


def _serve(pipe, setup: VllmSetup) -> None:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    gpus = ",".join(names[int(i)] if names else i for i in setup.gpus.split(","))
    os.environ.update(ENVIRONMENT, CUDA_VISIBLE_DEVICES=gpus)
    calls = None
    while True:
        message = ("start", ()) if calls is None else pipe.recv()
        if message is None:
            return
        name, args = message
        try:
            if calls is None:
                calls = _Calls(setup)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(calls, name)(*args)))
        except BaseException:  # noqa: BLE001  the parent raises it with this traceback
            pipe.send((False, traceback.format_exc()))
            if calls is None:
                return


class _Calls:
    def __init__(self, setup: VllmSetup) -> None:
        from vllm import LLM

        arch = Arch.load(setup.folder)
        table = PrecisionTable.build(arch, setup.policy)
        config = table.quantization_config()
        overrides = {"quantization_config": config} if config and setup.load_format == "dummy" else {}
        fp8 = {"linear_backend": setup.linear_backend} if config else {}
        settings = {
            "gpu_memory_utilization": 0.35, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 2048,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 16]},
        }  # fmt: skip
        self.llm = LLM(
            model=setup.folder, load_format=setup.load_format, skip_tokenizer_init=True, dtype="bfloat16",
            tensor_parallel_size=setup.layout.tp, enable_expert_parallel=setup.layout.ep > 1, hf_overrides=overrides,
            generation_config="vllm", seed=0, async_scheduling=False, enable_flashinfer_autotune=False, moe_backend="triton",
            worker_extension_cls="trt_rl.bench.vllm_worker.MeasuredExtension", disable_custom_all_reduce=True,
            **fp8, **(settings | setup.options),
        )  # fmt: skip

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def reset(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise WorkerFailed("vLLM did not reset its prefix cache: requests are running")

    def generate(self, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [
            (list(o.outputs[0].token_ids), [e[t].logprob for e, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)])
            for o in outputs
        ]


class VllmRefit:
    """Trainer parties and one vLLM engine, linked; a context."""

    def __init__(self, setup: VllmSetup, layout: Layout, transport: str, bucket_bytes: int, checkpoint: str = "") -> None:
        self.setup, self.layout = setup, layout
        arch = Arch.load(setup.folder)
        table = PrecisionTable.build(arch, setup.policy)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address, members = ("127.0.0.1", self.store.port), layout.world + setup.layout.world
        colocated = transport == "ipc"
        self.parties = Parties(Setup(arch, table, layout, setup.layout, address, "cuda", colocated, True, checkpoint))
        self.agreement = Agreement(layout, setup.layout, bucket_bytes, transport, Meeting(*address, members, layout.world, 120.0))

    def __enter__(self) -> VllmRefit:
        self.engine = VllmProcess(self.setup)
        try:
            return self._link()
        except BaseException:
            self.__exit__()  # processes that hold a GPU must not outlive a failed start
            raise

    def _link(self) -> VllmRefit:
        self.engine.finish("start")
        self.parties.__enter__()
        self.parties.begin("agree", self.agreement)
        digests = self.engine.call("rpc", "trt_rl_agree", self.agreement.to_json(), json.dumps(asdict(self.setup.policy)), 0)
        digests = digests + self.parties.finish("agree")
        if len(set(digests)) > 1:
            raise WorkerFailed(f"trainer and vLLM computed different routes: {digests}")
        self._both("join", "trt_rl_join")
        return self

    def _both(self, name: str, method: str, party_args: tuple = (), engine_args: tuple = ()) -> tuple[list[Any], list[Any]]:
        self.parties.begin(name, *party_args)
        self.engine.begin("rpc", method, *engine_args)
        return self.parties.finish(name), self.engine.finish(method)

    def refit(self, version: int, verify: str = "full") -> dict[str, Any]:
        """One whole refit, prefix cache reset included; timed from outside all processes."""
        started = time.perf_counter()
        self.parties.call("check")
        checked = time.perf_counter()
        self._both("prepare", "trt_rl_prepare")
        prepared = time.perf_counter()
        full = version == 0
        sent, received = self._both("move", "trt_rl_receive", (Refit(version, verify, full),), (version, verify, full))
        moved = time.perf_counter()
        if failures := [r["failure"] for r in received if "failure" in r]:
            raise WorkerFailed("; ".join(failures))
        self.engine.call("reset")
        ended = time.perf_counter()
        return {
            "total_s": ended - started,
            "check_s": checked - started,
            "prepare_s": prepared - checked,
            "move_s": moved - prepared,
            "reset_s": ended - moved,
            "bytes": sum(r["bytes"] for r in sent),
            "verified_slices": sum(r["verified"] for r in received),
            "trainer_host_s": sent[0]["seconds"],
            "engine_host_s": received[0]["seconds"],
        }

    def __exit__(self, *_: Any) -> None:
        self.parties.__exit__()
        self.engine.close()


def measure(setup: VllmSetup, layout: Layout, transport: str, bucket_bytes: int, repeats: int = 5) -> dict[str, Any]:
    """Refits of a loaded vLLM engine from random weights of the real shapes, and one generation after them."""
    from trt_rl.bench.refit import hardware

    with VllmRefit(setup, layout, transport, bucket_bytes) as linked:
        runs = [linked.refit(version) for version in range(repeats + 1)]
        unverified = [linked.refit(repeats + 1 + i, "off") for i in range(3)]
        tokens = linked.engine.call("generate", [[1, 2, 3, 4]] * 4, 16)
        quantize = [r for r in linked.parties.call("quantize_only", Refit(0, "off")) if r]
        copy = linked.parties.call("copy_bandwidth")[0]
        own = [linked.engine.call("rpc", "trt_rl_own_loader") for _ in range(3)] if setup.layout.world == 1 else []
        return {
            "hardware": hardware(),
            "setup": {**asdict(replace(setup, folder=Path(setup.folder).name)), "trainer": str(layout), "transport": transport},
            "bucket_mib": bucket_bytes / 2**20,
            "total_s": median(r["total_s"] for r in runs[1:]),
            "total_without_verify_s": median(r["total_s"] for r in unverified),
            "own_loader_s": [answers[0] for answers in own[1:]],
            "quantize_alone": quantize,
            "copy_gb_per_s": copy,
            "first": runs[0],
            "refits": runs[1:],
            "generates_after": all(len(t) == 16 for t, _ in tokens),
        }
