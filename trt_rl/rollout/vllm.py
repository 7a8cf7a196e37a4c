"""vLLM behind the engine interface: `AsyncLLM`, token ids in and out, weights written in place by a refit.

vLLM keeps its own processes for the engine core and the workers; `vllm_worker.RefitExtension` is loaded into each worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, Literal

import torch

from trt_rl.errors import EngineError, EngineLost, RefitError
from trt_rl.refit.member import Agreement
from trt_rl.refit.stream import Refit
from trt_rl.rollout.capabilities import CAPABILITIES, PauseMode
from trt_rl.rollout.engine import Completion, Request, request_problem
from trt_rl.rollout.hosted import HostedEngine

_PAUSE = {"drain": "wait", "abort": "abort", "keep": "keep"}
# Besides: no kernels that rearrange or requantize weights after loading; a refit writes them as the checkpoint has them.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process may have used CUDA before, which a fork does not survive
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
}


class VllmEngine(HostedEngine):
    capabilities = CAPABILITIES["vllm"]

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `HostedEngine`; options are fields of vLLM's `AsyncEngineArgs`, e.g. gpu_memory_utilization, max_num_seqs."""
        super().__init__(*args, **options)
        self._running: set[str] = set()

    # --- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        os.environ.update({key: os.environ.get(key, value) for key, value in _ENVIRONMENT.items()})
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = self.engine_args()
        if settings.get("distributed_executor_backend") == "ray":
            import ray

            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # vLLM's engine process would start a cluster of its own
        try:
            arguments = AsyncEngineArgs(**settings)
        except TypeError as error:
            raise EngineError(f"rollout.vllm: {error}; options are the fields of vLLM's AsyncEngineArgs") from error
        self._start_loop()

        async def build() -> AsyncLLM:
            self._open = asyncio.Event()
            self._open.set()
            return AsyncLLM.from_engine_args(arguments)

        try:
            self._llm = self._wait(build())
        except (RuntimeError, ValueError) as error:  # what vLLM and pydantic raise on settings that do not fit
            self._stop_loop()
            raise EngineError(f"vLLM did not start: {error}") from error

    def engine_args(self) -> dict[str, Any]:
        """What vLLM is started with: our arguments, and the recipe's own beside them."""
        quantization = self.table.quantization_config()
        overrides = dict(self.options.get("hf_overrides") or {})
        if quantization is not None:
            overrides["quantization_config"] = quantization
        backend = {"linear_backend": "triton", "moe_backend": "triton"} if torch.cuda.is_available() and quantization else {}
        defaults: dict[str, Any] = {"max_model_len": self.arch.max_positions}
        if self.layout.tp > 1:
            defaults["distributed_executor_backend"] = "mp"  # inside a placement group vLLM would look for bundles of its own
        return {
            **defaults,
            **backend,
            **self.options,
            "model": self.model_path,
            "skip_tokenizer_init": True,
            "load_format": "dummy",  # weights come with the first refit
            "dtype": "bfloat16",
            "tensor_parallel_size": self.layout.tp,
            "enable_expert_parallel": self.layout.ep > 1,
            "hf_overrides": overrides,
            "generation_config": "vllm",  # no sampling defaults from the checkpoint: the recipe's are the only ones
            "logprobs_mode": "processed_logprobs",  # under the distribution that sampled, temperature included
            "worker_extension_cls": "trt_rl.rollout.vllm_worker.RefitExtension",
            "disable_log_stats": True,
            "enable_sleep_mode": self.can_sleep,
        }

    def _end(self) -> None:
        self._llm.shutdown()

    @property
    def alive(self) -> bool:
        return not self._llm.errored

    def _wait(self, work: Coroutine) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return super()._wait(work)
        except EngineDeadError as error:
            raise self._ended(error) from error

    def _ended(self, error: Exception) -> EngineLost:
        self.poisoned = f"vLLM's engine process ended: {error}"
        return EngineLost(self.poisoned)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call every worker; the answer of each, in order of ranks."""
        answers = self._wait(self._llm.collective_rpc(method, args=args))
        if len(answers) != self.layout.tp:
            raise RefitError(f"{len(answers)} of {self.layout.tp} vLLM workers answered {method}")
        return answers

    # --- requests ----------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Completion:
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        if (problem := request_problem(request, self.arch)) is not None:
            raise EngineError(f"request {request.id}: {problem}")
        if self._llm.errored:
            raise EngineLost(f"the engine serves nothing: {self.poisoned}")
        if self.poisoned:
            raise EngineError(f"the engine serves nothing: {self.poisoned}")
        if self._asleep:
            raise EngineError(f"the engine sleeps ({', '.join(sorted(self._asleep))}); wake it first")
        sampling = request.sampling
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop tokens are the caller's
            logprobs=0,  # of the sampled token, no others
            detokenize=False,
        )
        await self._open.wait()  # while paused, a request waits here, where it does not hold a refit up
        done, version = Completion(request.id), self.version
        self._running.add(request.id)
        try:
            prompt = {"prompt_token_ids": list(request.prompt)}
            async for output in self._llm.generate(prompt, parameters, request_id=request.id):
                last = output
        except EngineDeadError as error:
            raise EngineLost(f"request {request.id}: {self._ended(error)}") from error
        finally:
            self._running.discard(request.id)
        result = last.outputs[0]
        done.tokens = list(result.token_ids)
        done.logprobs = [entry[token].logprob for entry, token in zip(result.logprobs or [], done.tokens, strict=True)]
        done.versions = [version] * len(done.tokens)
        done.finish = result.finish_reason if result.finish_reason in ("stop", "length") else "abort"
        self._count(
            requests=1, generated_tokens=len(done.tokens), prefill_tokens=len(request.prompt), cached_tokens=last.num_cached_tokens or 0
        )
        return done

    def abort(self, request_id: str) -> None:
        self._wait(self._llm.abort(request_id))

    def pause(self, mode: PauseMode) -> None:
        if mode not in _PAUSE:
            raise EngineError(f"pause mode {mode!r} is unknown; modes: {', '.join(_PAUSE)}")

        async def pause() -> None:
            self._open.clear()
            await self._llm.pause_generation(mode=_PAUSE[mode], clear_cache=False)
            while self._running and mode != "keep":  # until their callers have them
                await asyncio.sleep(0.001)

        self._wait(pause())

    def resume(self) -> None:
        async def resume() -> None:
            await self._llm.resume_generation()
            self._open.set()

        self._wait(resume())

    # --- sleep -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        if not self.can_sleep:
            raise EngineError("the engine was not started to sleep; set rollout.colocated = true")
        if self._running:
            raise EngineError(f"{len(self._running)} requests are running; pause the engine (drain or abort) before it sleeps")
        self.poisoned = "asleep: its weights are gone until a refit commits"
        self._wait(self._llm.sleep(level=2))  # weights are dropped, not kept in host memory: a refit brings all of them
        self._asleep = {"weights", "kv_cache"}

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        if what in self._asleep:
            self._wait(self._llm.wake_up(tags=[what]))
            self._asleep.discard(what)

    # --- refit -------------------------------------------------------------------------------------------------

    def agree_refit(self, agreement: Agreement, replica: int) -> list[str]:
        first = replica * self.layout.tp
        policy = json.dumps(asdict(self.table.policy))
        return self._rpc("trt_rl_agree", agreement.to_json(), policy, first)

    def join_refit(self) -> None:
        self._rpc("trt_rl_join")

    def prepare_refit(self, version: int) -> None:
        self._refuse_older(version)
        if "weights" in self._asleep:
            raise RefitError("the engine sleeps; wake its weights before a refit")
        self._rpc("trt_rl_prepare")

    def receive_refit(self, refit: Refit) -> list[dict[str, Any]]:
        if self._running:
            self._rpc("trt_rl_disconnect")  # the trainer must not wait for this engine
            raise RefitError(f"{len(self._running)} requests are running; pause the engine (drain or abort) before a refit")
        self.poisoned = f"a refit to version {refit.version} has begun and not committed"
        try:
            reports = self._rpc("trt_rl_receive", refit.version, refit.verify, refit.full)
        except TimeoutError as error:
            self.poisoned = f"a refit failed: vLLM's workers did not answer within {self.wait_s:.0f} s"
            raise RefitError(self.poisoned) from error
        if failures := [answer["failure"] for answer in reports if "failure" in answer]:
            self.poisoned = f"a refit failed: {'; '.join(failures)}"
            raise RefitError("; ".join(failures))
        self._received = refit.version
        return reports

    def disconnect_refit(self) -> None:
        with contextlib.suppress(EngineError):
            self._rpc("trt_rl_disconnect")

    def reset_prefix_cache(self) -> None:
        if self._wait(self._llm.reset_prefix_cache()) is False:
            raise RefitError("vLLM did not reset its prefix cache; requests hold blocks of it")
