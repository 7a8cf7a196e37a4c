"""TensorRT-LLM behind the engine interface: `AsyncLLM` on Ray, token ids in and out, FP8 weights by refit.

The engine lives on an event loop of its own, so that every method may be called from any thread. TensorRT-LLM starts one
Ray worker a rank in the bundles of `home`; `trtllm_worker.RefitExtension` is loaded into each. Its PyTorch backend
calls Ray orchestration a prototype and changes it between releases: `trtllm_features.probe` looks at what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ray.exceptions import RayError

from trt_rl.errors import EngineError, EngineLost, RefitError
from trt_rl.processes import scrub_mpi_variables
from trt_rl.refit.member import Agreement
from trt_rl.refit.stream import Refit
from trt_rl.rollout.capabilities import CAPABILITIES, PauseMode
from trt_rl.rollout.engine import SEEDS, Completion, Request, Sampling, request_problem
from trt_rl.rollout.hosted import HostedEngine
from trt_rl.rollout.trtllm_features import FLOOR, probe

_ENVIRONMENT = {
    "TLLM_DISABLE_MPI": "1",  # before the import, which brings mpi4py along
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # the parallel loader does not take partial loads
    "TLLM_NUMA_AWARE_WORKER_AFFINITY": "0",  # workers inherit Ray's CPU mask, which the affinity code does not expect
}
_EXTENSION = "trt_rl.rollout.trtllm_worker.RefitExtension"
_WAIT_S = 1800.0  # for one answer to a control call; a large model takes minutes to come up
_PULSE_S = 5.0  # how often workers are asked whether they live, while requests run
# What TensorRT-LLM, pydantic and Ray raise on settings or calls that do not fit.
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, NotImplementedError, RayError)


@dataclass
class _Running:
    request: Request
    result: Any = None
    """TensorRT-LLM's own, while the request is with it."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Gate:
    """Requests pass while it is open. Made on the engine's loop."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    keep: bool = False
    """What a pause ended is continued after it."""


class TrtllmEngine(HostedEngine):
    capabilities = CAPABILITIES["trtllm"]
    wait_s = _WAIT_S

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `HostedEngine`; options are fields of TensorRT-LLM's `TorchLlmArgs`, e.g. kv_cache_config, max_batch_size."""
        super().__init__(*args, **options)
        self._running: dict[str, _Running] = {}
        self._llm: Any = None

    # --- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.home is None:
            raise EngineError("TensorRT-LLM's workers need a placement group: set `home` before `start`")
        scrub_mpi_variables()
        os.environ.update({key: os.environ.get(key, value) for key, value in _ENVIRONMENT.items()})
        self.features = probe()
        self._refuse_release()
        settings = self.llm_args()
        self._start_loop()

        async def build() -> Any:
            from tensorrt_llm import AsyncLLM

            self._gate, self._lost = _Gate(), self._loop.create_future()
            self._gate.open.set()
            share = {} if self.home.gpu_share is None else {"per_worker_gpu_share": self.home.gpu_share}
            llm = AsyncLLM(placement_groups=[self.home.group], placement_bundle_indices=[list(self.home.bundles)], **share, **settings)
            await llm.setup_async()
            return llm

        try:
            self._llm = super()._wait(build())
        except _REFUSALS as error:
            self._stop_loop()
            raise EngineError(f"TensorRT-LLM {self.features.version} did not start: {type(error).__name__}: {error}") from error
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def _refuse_release(self) -> None:
        """Name what this release cannot do, before anything starts."""
        found, fp8 = self.features, self.table.format != "bf16"
        if fp8 and not found.fp8_block_refit:
            raise EngineError(
                f"TensorRT-LLM {found.version} cannot load FP8 weights in parts, so no refit can bring them; use {FLOOR} or newer"
            )
        if found.below_floor and len(self._nodes()) > 1:
            raise EngineError(f"TensorRT-LLM {found.version} does not serve a replica across nodes under Ray; use {FLOOR} or newer")
        if self.can_sleep and found.sleep is None:
            raise EngineError(f"TensorRT-LLM {found.version} cannot sleep; use {FLOOR} or newer, or rollout.colocated = false")

    def _nodes(self) -> set[str]:
        from ray.util import placement_group_table

        where = placement_group_table(self.home.group)["bundles_to_node_id"]
        return {where[index] for index in self.home.bundles}

    def llm_args(self) -> dict[str, Any]:
        """What TensorRT-LLM is started with: our arguments, and the recipe's own beside them."""
        from tensorrt_llm.llmapi import CapacitySchedulerPolicy, CudaGraphConfig, SchedulerConfig

        quantization = self.table.quantization_config()
        overrides = dict(self.options.get("model_kwargs") or {})
        if quantization is not None:
            overrides["quantization_config"] = quantization
        longest = self.options.get("max_seq_len", self.arch.max_positions)
        ours: dict[str, Any] = {
            "model": self.model_path,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "load_format": "dummy",  # weights come with the first refit
            "tensor_parallel_size": self.layout.tp,
            "pipeline_parallel_size": 1,  # log-probs are doubled under pipeline parallelism until PR #12623
            "max_seq_len": longest,
            "max_input_len": longest,  # its default of 1024 refuses longer prompts
            "allreduce_strategy": "NCCL",  # the default fails TensorRT-LLM's own test with several engines under Ray
            "torch_compile_config": None,  # compiled modules have other names, and a refit would load nothing
            "ray_worker_extension_cls": _EXTENSION,
        }
        if self.layout.ep > 1:
            ours |= {"moe_expert_parallel_size": self.layout.ep, "moe_tensor_parallel_size": self.layout.tp // self.layout.ep}
        if overrides:
            ours["model_kwargs"] = overrides
        defaults = {
            "enable_chunked_prefill": True,
            "scheduler_config": SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION),
            "cuda_graph_config": CudaGraphConfig(enable_padding=True),
        }
        return defaults | self.options | ours | self._sleep_args()

    def _sleep_args(self) -> dict[str, Any]:
        if not self.can_sleep:
            return {}
        if self.features.sleep == "enable_sleep":
            return {"enable_sleep": True}
        from tensorrt_llm.llmapi import ExecutorMemoryType, SleepConfig

        # The KV cache is refilled. Weights come back from host memory: besides what a refit writes there are constants.
        return {"sleep_config": SleepConfig(restore_modes={ExecutorMemoryType.KV_CACHE: "NONE"})}

    def _end(self) -> None:
        self._fail(EngineLost("the engine was stopped"))
        self._llm.shutdown()

    def _wait(self, work: Coroutine) -> Any:
        try:
            return super()._wait(work)
        except RayError as error:
            if not _is_death(error):
                raise
            gone = EngineLost(f"a TensorRT-LLM worker ended: {_first_line(error)}")
            raise (super()._wait(self._look()) or self._fail(gone)) from error

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call every worker; the answer of each, in order of ranks. Every rank's answer is checked.

        Raises:
            RefitError: a rank refused or failed.
            EngineLost: a worker has ended.
        """
        try:
            answers = self._wait(self._llm.collective_rpc(method, args=args))
        except RayError as error:
            raise RefitError(f"{method} failed in a TensorRT-LLM worker: {_first_line(error)}") from error
        except _REFUSALS as error:
            raise RefitError(f"{method} failed in a TensorRT-LLM worker: {type(error).__name__}: {error}") from error
        if len(answers) != self.layout.tp:
            raise RefitError(f"{len(answers)} of {self.layout.tp} TensorRT-LLM workers answered {method}")
        if failures := [a["failure"] for a in answers if isinstance(a, dict) and "failure" in a]:
            raise RefitError("; ".join(failures))
        return answers

    async def _watch(self) -> None:
        """Notice the death of a worker while requests run: TensorRT-LLM itself may go on waiting for it."""
        while not self._lost.done():
            await asyncio.sleep(_PULSE_S)
            if self._running and self._gate.open.is_set():
                await self._look()

    async def _look(self) -> EngineLost | None:
        """Ask the workers whether they live; the engine is lost if one of them has ended."""

        async def ask(rank: int) -> EngineLost | None:
            with contextlib.suppress(TimeoutError):  # a worker that is busy answers later
                try:
                    await asyncio.wait_for(self._llm.collective_rpc("trt_rl_alive", unique_reply_rank=rank), _PULSE_S)
                except RayError as error:
                    if _is_death(error):
                        return EngineLost(f"the TensorRT-LLM worker of rank {rank} ended: {_first_line(error)}")
            return None

        dead = next(filter(None, await asyncio.gather(*map(ask, range(self.layout.tp)))), None)
        return dead and self._fail(dead)

    # --- requests ----------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Completion:
        if (problem := request_problem(request, self.arch)) is not None:
            raise EngineError(f"request {request.id}: {problem}")
        done, running = Completion(request.id, finish="abort"), _Running(request)
        self._running[request.id] = running
        try:
            await self._pass_gate(running)
            while not running.aborted.is_set():
                result, version = await self._once(running, done), self.version
                output = result.outputs[0]
                done.tokens += output.token_ids
                # The dict may hold the likeliest token beside the sampled one.
                done.logprobs += [_logprob(entry, t) for entry, t in zip(output.logprobs, output.token_ids, strict=True)]
                done.versions += [version] * len(output.token_ids)
                done.finish = _finish(output.finish_reason)
                self._count(
                    generated_tokens=len(output.token_ids),
                    prefill_tokens=len(result.prompt_token_ids),
                    cached_tokens=result.cached_tokens or 0,
                )
                left = request.sampling.max_tokens - len(done.tokens)
                if done.finish != "abort" or not self._gate.keep or not left:
                    break
                running.result = None
                await self._pass_gate(running)  # a pause that keeps: go on from the tokens there are
                self._count(continued=not running.aborted.is_set())
        finally:
            self._running.pop(request.id, None)
        self._count(requests=1)
        return done

    async def _once(self, running: _Running, done: Completion) -> Any:
        """Send what there is of a request to TensorRT-LLM and wait for its end."""
        if self.poisoned:
            kind = EngineLost if self._lost.done() else EngineError
            raise kind(f"the engine serves nothing: {self.poisoned}")
        if self._asleep:
            raise EngineError(f"the engine sleeps ({', '.join(sorted(self._asleep))}); wake it first")
        request = running.request
        prompt = [*request.prompt, *done.tokens]
        parameters = self._sampling_params(request.sampling, len(done.tokens))
        try:
            running.result = self._llm.generate_async(prompt, sampling_params=parameters, streaming=False)
            waiting = asyncio.ensure_future(_result(running.result))
            await asyncio.wait({waiting, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                raise self._lost.exception()
            return waiting.result()
        except RayError as error:
            raise self._fail(EngineLost(f"TensorRT-LLM lost a worker: {_first_line(error)}")) from error
        except _REFUSALS as error:
            if (lost := await self._look()) is not None:  # what looks like a refusal may be the echo of a worker's end
                raise lost from error
            raise EngineError(f"request {request.id}: TensorRT-LLM refused it: {type(error).__name__}: {error}") from error

    async def _pass_gate(self, running: _Running) -> None:
        """While paused, a request waits here, where it does not hold a refit up; an abort ends the wait. Nothing may be
        awaited between the last look at the gate and TensorRT-LLM, or a pause could miss the request."""
        while not (self._gate.open.is_set() or running.aborted.is_set() or self._lost.done()):
            events = [asyncio.ensure_future(event.wait()) for event in (self._gate.open, running.aborted)]
            await asyncio.wait({*events, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            for event in events:
                event.cancel()
        if self._lost.done():
            raise self._lost.exception()

    def _sampling_params(self, sampling: Sampling, done: int) -> Any:
        from tensorrt_llm import SamplingParams

        greedy = sampling.temperature == 0
        extra: dict[str, Any] = {}
        if self.features.processed_logprobs:
            from tensorrt_llm.sampling_params import LogprobMode

            # Of greedy tokens the plain softmax is reported, as the interface says.
            extra["logprobs_mode"] = LogprobMode.RAW if greedy else LogprobMode.PROCESSED
        elif not greedy and (sampling.temperature != 1 or sampling.top_p != 1 or sampling.top_k):
            raise EngineError(
                f"TensorRT-LLM {self.features.version} reports log-probs before temperature, top_p and top_k; with temperature = "
                f"{sampling.temperature}, top_p = {sampling.top_p}, top_k = {sampling.top_k} they are not of what was sampled. "
                f"Use 1, 1 and 0, or {FLOOR} or newer"
            )
        if not greedy:
            extra |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "seed": _seed(sampling, done)}
        return SamplingParams(
            max_tokens=sampling.max_tokens - done,
            end_id=-1,  # with None it asks for a tokenizer; stop tokens are the caller's
            stop_token_ids=list(sampling.stop_token_ids) or None,
            include_stop_str_in_output=True,  # the stop token stays in token_ids
            logprobs=0 if self.features.processed_logprobs else 1,  # of the sampled token; older releases count from 1
            detokenize=False,
            **extra,
        )

    def abort(self, request_id: str) -> None:
        if (running := self._running.get(request_id)) is not None:
            self._loop.call_soon_threadsafe(running.aborted.set)
            if (result := running.result) is not None:
                result.abort()

    def pause(self, mode: PauseMode) -> None:
        if mode not in self.capabilities.pause_modes:
            raise EngineError(f"pause mode {mode!r} is unknown; modes: {', '.join(self.capabilities.pause_modes)}")
        self._on_loop(lambda: (self._gate.open.clear(), setattr(self._gate, "keep", mode == "keep")))
        deadline = time.monotonic() + _WAIT_S
        while with_engine := self._with_engine():
            if self._lost.done():
                return
            for result in with_engine if mode != "drain" else ():
                if not result.finished:
                    result.abort()
            if time.monotonic() > deadline:
                raise EngineError(f"{len(with_engine)} requests did not end within {_WAIT_S:.0f} s of a pause ({mode})")
            time.sleep(0.005)
        if self.features.pause_generation:
            self._wait(self._llm.pause_generation())

    def _with_engine(self) -> list[Any]:
        """Results that TensorRT-LLM works on. Requests that wait at the gate, new or kept by a pause, are not among them."""
        return [result for running in list(self._running.values()) if (result := running.result) is not None]

    def resume(self) -> None:
        if self.features.pause_generation:
            self._wait(self._llm.resume_generation())
        self._on_loop(self._gate.open.set)

    def _on_loop(self, act: Any) -> None:
        async def call() -> None:
            act()

        self._wait(call())

    # --- sleep -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        if not self.can_sleep:
            raise EngineError("the engine was not started to sleep; set rollout.colocated = true")
        if running := len(self._with_engine()):
            raise EngineError(f"{running} requests are running; pause the engine (drain or abort) before it sleeps")
        self.reset_prefix_cache()  # releasing memory does not clear the index of reusable blocks
        self.poisoned = "asleep: its weights are gone until a refit commits"
        self._wait_refusals(self._llm.release([*self._weight_tags(), "kv_cache"]))
        self._asleep = {"weights", "kv_cache"}

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        if what in self._asleep:
            self._wait_refusals(self._llm.resume(self._weight_tags() if what == "weights" else ["kv_cache"]))
            self._asleep.discard(what)

    def _weight_tags(self) -> list[str]:
        """Of everything but the KV cache and what was kept out of graph capture."""
        if self.features.sleep == "enable_sleep":
            from tensorrt_llm._torch.virtual_memory import ExecutorMemoryType
        else:
            from tensorrt_llm.llmapi import ExecutorMemoryType
        tags = [tag.value for tag in ExecutorMemoryType]
        return [tag for tag in tags if tag != "kv_cache" and not tag.startswith("_")]

    def _wait_refusals(self, work: Coroutine) -> None:
        try:
            self._wait(work)
        except _REFUSALS as error:
            raise EngineError(f"TensorRT-LLM refused to sleep or wake: {type(error).__name__}: {error}") from error

    # --- refit -------------------------------------------------------------------------------------------------

    def agree_refit(self, agreement: Agreement, replica: int) -> list[str]:
        policy, first = json.dumps(asdict(self.table.policy)), replica * self.layout.tp
        arguments = agreement.to_json(), policy, self.model_path, self.layout.tp, self.layout.ep, first
        return [answer["digest"] for answer in self._rpc("trt_rl_agree", *arguments)]

    def join_refit(self) -> None:
        self._rpc("trt_rl_join")

    def prepare_refit(self, version: int) -> None:
        self._refuse_older(version)
        if "weights" in self._asleep:
            raise RefitError("the engine sleeps; wake its weights before a refit")
        self._rpc("trt_rl_prepare")

    def receive_refit(self, refit: Refit) -> list[dict[str, Any]]:
        if running := len(self._with_engine()):
            self._rpc("trt_rl_disconnect")  # the trainer must not wait for this engine
            raise RefitError(f"{running} requests are running; pause the engine (drain or abort) before a refit")
        self.poisoned = f"a refit to version {refit.version} has begun and not committed"
        try:
            reports = self._rpc("trt_rl_receive", refit.version, refit.verify, refit.full)
            self._rpc("update_weights", None)  # TensorRT-LLM's end of an update: post-processing and prefix cache, on every rank
            compared = self._rpc("trt_rl_verify")
        except (RefitError, EngineLost) as error:
            self.poisoned = f"a refit failed: {error}"
            if not self._lost.done():
                with contextlib.suppress(RefitError, EngineLost):  # the failure itself is what the caller must hear of
                    self._rpc("trt_rl_abort")
            raise
        self._received = refit.version
        return [report | answer for report, answer in zip(reports, compared, strict=True)]

    def disconnect_refit(self) -> None:
        with contextlib.suppress(EngineLost):
            self._rpc("trt_rl_disconnect")

    def reset_prefix_cache(self) -> None:
        self._rpc("trt_rl_reset_prefix_cache")


async def _result(result: Any) -> Any:
    return await result


def _logprob(entry: Any, token: int) -> float:
    """Of the sampled token; newer releases may give plain numbers."""
    return float(entry) if isinstance(entry, float) else entry[token].logprob


def _finish(reason: str | None) -> Literal["stop", "length", "abort"]:
    if reason in ("stop", "length"):
        return reason
    if reason == "cancelled":
        return "abort"
    raise EngineError(f"TensorRT-LLM ended a request for the reason {reason!r}, which means nothing here")


def _seed(sampling: Sampling, done: int) -> int:
    """Of what is left of a request: a continued one must not draw its first numbers again."""
    return (sampling.seed + done) % SEEDS


def _is_death(error: RayError) -> bool:
    from ray.exceptions import NodeDiedError, RayActorError, WorkerCrashedError

    return isinstance(error, (RayActorError, WorkerCrashedError, NodeDiedError))


def _first_line(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # what a worker raised, not where
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
