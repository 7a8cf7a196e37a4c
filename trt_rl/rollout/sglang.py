"""SGLang behind the engine interface: `Engine`'s processes, token ids in and out, weights written in place by a refit.

The adapter lives on an event loop of its own, so that every method may be called from any thread, and calls the
coroutines of SGLang's tokenizer manager (`Engine`'s own methods block a loop). `sglang_worker.run_command` runs in every
scheduler process. Tested with SGLang 0.5.16 on one GPU (tests/gpu/test_sglang.py), and with a stand-in for it where there is none
(tests/contracts/sglang_fake).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from trt_rl.errors import EngineError, EngineLost, RefitError
from trt_rl.refit.member import Agreement
from trt_rl.refit.stream import Refit
from trt_rl.rollout.capabilities import CAPABILITIES, PauseMode
from trt_rl.rollout.engine import Completion, Request, Sampling, request_problem
from trt_rl.rollout.hosted import HostedEngine
from trt_rl.rollout.sglang_worker import LOADER

_SPARE = 6  # positions that SGLang keeps of its context length: it cuts max_new_tokens by 2, and refuses prompts 6 below it
_WAIT_S = 1800.0  # for one answer to a control call; a large model takes minutes to come up
_IDLE_S = 60.0  # for the scheduler to run out of work whose results are here already
_PULSE_S = 0.5  # how often SGLang's processes are looked at
_PRESS_S = 0.05  # an abort that overtakes its request is forgotten by SGLang: it is repeated
_TAGS = ("kv_cache", "weights")
_REFUSALS = (ValueError, RuntimeError, TypeError, AssertionError, ImportError, OSError)


@dataclass(eq=False)
class _Running:
    request: Request
    rid: str = ""
    """SGLang's own id of what it has now. All are equally long: SGLang aborts by prefix."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class SglangEngine(HostedEngine):
    capabilities = CAPABILITIES["sglang"]
    wait_s = _WAIT_S

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `HostedEngine`; options are fields of SGLang's `ServerArgs`, e.g. mem_fraction_static, max_running_requests. Without
        `enable_deterministic_inference` (on unless it is given) SGLang is faster and ignores seeds."""
        super().__init__(*args, **options)
        self._waiting: set[_Running] = set()
        self._running: set[_Running] = set()

    # --- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._refuse_settings()
        # Room for what SGLang keeps of the context; requests beyond the model's positions are refused here.
        os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
        _outlive_sigquit()
        settings = self.engine_args()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = itertools.count()
        self._start_loop()

        async def build() -> None:
            from sglang.srt.entrypoints.engine import Engine

            self._lost = self._loop.create_future()
            self._open = asyncio.Event()
            self._open.set()
            self._engine = Engine(**settings)  # reads the running loop, and blocks it until the model is up
            self._manager = self._engine.tokenizer_manager

        try:
            super()._wait(build())  # ours waits for the end of what is not there yet
        except _REFUSALS as error:
            self._stop_loop()
            if isinstance(error, TypeError):
                raise EngineError(f"rollout.sglang: {error}; options are the fields of SGLang's ServerArgs") from error
            raise EngineError(f"SGLang did not start: {type(error).__name__}: {error}") from error
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def _refuse_settings(self) -> None:
        """Name what SGLang would do differently from what the interface says, before anything starts."""
        tp, ep = self.layout.tp, self.layout.ep
        if ep not in (1, tp):
            raise EngineError(f"rollout.parallel.ep = {ep} with tp = {tp}: SGLang orders expert ranks differently; use ep = 1 or {tp}")
        if self.arch.experts and len(self.arch.moe_layers) < self.arch.layers:
            raise EngineError("model.path: SGLang's Qwen3-MoE has experts in every layer, this model has dense layers; use another engine")
        if os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0").lower() in ("1", "true", "yes", "y"):
            raise EngineError("SGLANG_RETURN_ORIGINAL_LOGPROB gives log-probs at temperature 1, not of what sampled; unset it")

    def engine_args(self) -> dict[str, Any]:
        """What SGLang is started with: our arguments, and the recipe's own beside them."""
        options = dict(self.options)
        overrides = json.loads(options.pop("json_model_override_args", None) or "{}")
        quantization = self.table.quantization_config()
        if quantization is not None:
            overrides["quantization_config"] = quantization
        # Kernels that take weights as a checkpoint has them, on Hopper and after it.
        kernels = {"moe_runner_backend": "triton"} if self.arch.experts else {}
        if quantization is not None:
            kernels["fp8_gemm_runner_backend"] = "triton"
        return {
            "enable_deterministic_inference": True,  # SGLang ignores seeds without it
            "context_length": self.arch.max_positions + _SPARE,
            **kernels,
            **options,
            "custom_weight_loader": [*(options.get("custom_weight_loader") or ()), LOADER],
            "model_path": self.model_path,
            "skip_tokenizer_init": True,
            "load_format": "dummy",  # weights come with the first refit
            "dtype": "bfloat16",
            "tp_size": self.layout.tp,
            "ep_size": self.layout.ep,
            "json_model_override_args": json.dumps(overrides),
            "sampling_defaults": "openai",  # none from the checkpoint: the recipe's are the only ones
            "enable_memory_saver": self.can_sleep,
        }

    def _end(self) -> None:
        """SGLang's own shutdown ends every child of this process, which must have no others."""
        self._fail(EngineLost("the engine was stopped"))
        self._engine.shutdown()

    async def _watch(self) -> None:
        """Notice the end of one of SGLang's processes: what waits for its answer would wait for ever."""
        pids = set(self._engine.get_all_child_pids())
        while not self._lost.done():
            await asyncio.wait({self._lost}, timeout=_PULSE_S)
            if ended := pids - {child.pid for child in multiprocessing.active_children()}:
                self._fail(EngineLost(f"SGLang's process {min(ended)} has ended"))

    async def _finished(self, work: Awaitable) -> asyncio.Future:
        """`work`, done.

        Raises:
            EngineLost: SGLang ended first.
        """
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise EngineLost(f"the engine serves nothing: {self._lost.exception()}")
        return task

    def _wait(self, work: Awaitable) -> Any:
        async def finish() -> Any:
            return (await self._finished(work)).result()

        return super()._wait(finish())

    # --- requests ----------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Completion:
        problem = request_problem(request, self.arch) or _sampling_problem(request.sampling)
        if problem is not None:
            raise EngineError(f"request {request.id}: {problem}")
        done, running = Completion(request.id, finish="abort"), _Running(request)
        if not await self._enter(running):
            return done
        try:
            while True:
                reason = (await self._once(running, done))["finish_reason"]
                finish = _finish(reason, done, request.sampling, running.aborted.is_set())
                if finish is not None:
                    done.finish = finish
                    break
                self._count(continued=1)
        finally:
            self._running.discard(running)
        self._count(requests=1)
        return done

    async def _enter(self, running: _Running) -> bool:
        """Pass the gate. While paused, a request waits here, where it does not hold a refit up; False if it was aborted."""
        while not (self._open.is_set() or running.aborted.is_set() or self._lost.done()):
            self._waiting.add(running)
            opened, aborted = asyncio.ensure_future(self._open.wait()), asyncio.ensure_future(running.aborted.wait())
            try:
                await asyncio.wait({opened, aborted, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._waiting.discard(running)
                opened.cancel()
                aborted.cancel()
        if self._lost.done():
            raise EngineLost(f"the engine serves nothing: {self._lost.exception()}")
        if running.aborted.is_set():
            return False
        if self.poisoned or self._asleep:
            raise EngineError(f"the engine serves nothing: {self.poisoned or 'it sleeps: ' + ', '.join(sorted(self._asleep))}")
        self._running.add(running)
        return True

    async def _once(self, running: _Running, done: Completion) -> dict[str, Any]:
        """Give SGLang what there is of a request, wait for its end, and add what came to `done`."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request, version, running.rid = running.request, self.version, uuid.uuid4().hex
        truncated = _truncates(request.sampling)
        asked = GenerateReqInput(
            rid=running.rid,
            input_ids=[*request.prompt, *done.tokens],
            sampling_params=_sampling_params(request.sampling, len(done.tokens)),
            return_logprob=True,
            return_sampling_mask=truncated,
        )
        generator = self._manager.generate_request(asked, None)
        task = await self._finished(anext(generator))
        await generator.aclose()  # it holds SGLang's lock on weights until then
        if (error := task.exception()) is not None:
            raise EngineError(f"request {request.id}: SGLang refused it: {type(error).__name__}: {error}") from error
        output = task.result()
        tokens, meta = output["output_ids"], output["meta_info"]
        key = "output_token_sampling_logprobs" if truncated else "output_token_logprobs"
        logprobs = meta.get(key) or []
        if len(logprobs) != len(tokens):
            raise EngineError(f"request {request.id}: SGLang gave {len(logprobs)} log-probs ({key}) for {len(tokens)} tokens")
        self._count(generated_tokens=len(tokens))
        if not done.tokens:
            self._count(prefill_tokens=len(request.prompt), cached_tokens=meta.get("cached_tokens") or 0)  # none if it never ran
        done.logprobs += logprobs if truncated else [entry[0] for entry in logprobs]
        done.tokens += tokens
        done.versions += [version] * len(tokens)
        return meta

    def abort(self, request_id: str) -> None:
        async def abort() -> None:
            self._press([r for r in (*self._waiting, *self._running) if r.request.id == request_id])

        self._wait(abort())

    def _press(self, targets: list[_Running]) -> None:
        """Abort, again and again until the request is gone."""

        async def press() -> None:
            while left := self._running.intersection(targets):
                for running in left:
                    self._manager.abort_request(rid=running.rid)
                await asyncio.sleep(_PRESS_S)

        for running in targets:
            running.aborted.set()
        self._pressing = asyncio.ensure_future(press())

    def pause(self, mode: PauseMode) -> None:
        if mode not in self.capabilities.pause_modes:
            raise EngineError(f"pause mode {mode!r} is unknown to SGLang; modes: {', '.join(self.capabilities.pause_modes)}")

        async def pause() -> None:
            self._open.clear()
            if mode == "abort":
                self._press(list(self._running))
            while self._running:  # until their callers have them
                await asyncio.sleep(0.001)

        self._wait(pause())

    def resume(self) -> None:
        async def resume() -> None:
            self._open.set()

        self._wait(resume())

    # --- memory ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if not self.can_sleep:
            raise EngineError("SGLang was started without memory saving; set rollout.colocated = true")
        if self._asleep:
            return
        if running := self._wait(self._close("it slept and lost its weights: a refit has to commit")):
            raise EngineError(f"{running} requests are running; pause the engine (drain or abort) before it sleeps")
        self.reset_prefix_cache()  # waits until the scheduler is idle: asked to release earlier, it would end
        self._wait(self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(_TAGS)), None))
        self._asleep = set(_TAGS)

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if what not in _TAGS:
            raise EngineError(f"SGLang cannot wake {what!r}; it knows {', '.join(_TAGS)}")
        if what in self._asleep:
            self._wait(self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[what]), None))
            self._asleep.discard(what)

    # --- refit -------------------------------------------------------------------------------------------------

    def _rpc(self, do: str, **arguments: Any) -> list[Any]:
        """Have every rank run one command; the answer of each, in order of ranks.

        Raises:
            RefitError: a rank refused or failed.
            EngineLost: one of SGLang's processes ended.
        """
        try:
            return self._wait(self._command(do, arguments))
        except _REFUSALS as error:
            raise RefitError(f"SGLang did not run {do}: {type(error).__name__}: {error}") from error

    async def _command(self, do: str, arguments: dict[str, Any]) -> list[Any]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput, UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        call, ranks = next(self._calls), range(self.layout.tp)
        keys = [f"{call}/{rank}" for rank in ranks]
        payloads = []
        for rank, key in zip(ranks, keys, strict=True):
            mine = arguments | ({"engine_rank": arguments["engine_rank"] + rank} if "engine_rank" in arguments else {})
            text = json.dumps({"do": do, "rank": rank, "store": self._store.port, "key": key, "arguments": mine})
            payloads.append(MultiprocessingSerializer.serialize([(text, torch.empty(0))]))
        # An update waits for all requests to end, unless generation is paused: between two passes, without a change.
        busy = bool(self._running)
        if busy:
            await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        try:
            update = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False)
            success, message = await self._manager.update_weights_from_tensor(update, None)
        finally:
            if busy:
                await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        if not success or not self._store.check(keys):
            raise RefitError(f"SGLang's ranks did not all answer {do}: {message}")
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        if failures := [answer["failure"] for answer in answers if "failure" in answer]:
            raise RefitError("; ".join(failures))
        return [answer["answer"] for answer in answers]

    async def _close(self, reason: str) -> int:
        """Serve nothing from here on, unless requests are running; how many are."""
        if not self._running:
            self.poisoned = reason
        return len(self._running)

    def agree_refit(self, agreement: Agreement, replica: int) -> list[str]:
        return self._rpc(
            "agree",
            agreement=agreement.to_json(),
            policy=asdict(self.table.policy),
            folder=self.model_path,
            engine_rank=replica * self.layout.tp,
        )

    def join_refit(self) -> None:
        self._rpc("join")

    def prepare_refit(self, version: int) -> None:
        self._refuse_older(version)
        if "weights" in self._asleep:
            raise RefitError("the engine's weights sleep; wake('weights') comes before a refit")
        self._rpc("prepare")

    def receive_refit(self, refit: Refit) -> list[dict[str, Any]]:
        if running := self._wait(self._close(f"a refit to version {refit.version} has begun and not committed")):
            self._rpc("disconnect")  # the trainer must not wait for this engine
            raise RefitError(f"{running} requests are running; pause the engine (drain or abort) before a refit")
        try:
            reports = self._rpc("receive", version=refit.version, verify=refit.verify, full=refit.full)
        except RefitError as error:
            self.poisoned = f"a refit failed: {error}"
            raise
        self._received = refit.version
        return reports

    def disconnect_refit(self) -> None:
        with contextlib.suppress(EngineError):
            self._rpc("disconnect")

    def reset_prefix_cache(self) -> None:
        answer = self._wait(self._manager.flush_cache(timeout_s=_IDLE_S))
        if not answer.success:
            raise RefitError(f"SGLang did not flush its prefix cache: {answer.message or 'requests are running'}")


def _finish(reason: dict[str, Any], done: Completion, sampling: Sampling, aborted: bool) -> Literal["stop", "length", "abort"] | None:
    """How a request ended, in the interface's words; None if it has to go on.

    Raises:
        EngineError: SGLang ended it on grounds of its own.
    """
    kind, matched = reason["type"], reason.get("matched")
    if kind == "stop" and isinstance(matched, str):
        raise EngineError(f"request {done.id}: SGLang ended it: {matched}")  # logits that are not numbers
    if kind != "abort" and done.tokens and done.tokens[-1] in sampling.stop_token_ids:
        return "stop"  # SGLang calls it length where the last token that was allowed is a stop token
    if len(done.tokens) == sampling.max_tokens:
        return "length"
    if kind == "abort" or aborted:
        return "abort"
    if kind == "length":
        raise EngineError(
            f"request {done.id}: SGLang ended it after {len(done.tokens)} of {sampling.max_tokens} tokens: its context or KV cache is "
            "too small; raise rollout.sglang.context_length, max_total_tokens or mem_fraction_static"
        )
    return None  # an end-of-sequence token of the checkpoint's; only the recipe says what stops


def _truncates(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _sampling_problem(sampling: Sampling) -> str | None:
    """What SGLang cannot do of it: log-probs under a truncated distribution come only with a finite top_k."""
    if _truncates(sampling) and not sampling.top_k:
        return (
            f"top_p = {sampling.top_p} with top_k = 0: SGLang tells log-probs under the distribution that sampled only where "
            "top_k bounds it; set top_k too (1024, say), or top_p = 1"
        )
    return None


def _sampling_params(sampling: Sampling, done: int) -> dict[str, Any]:
    greedy, stops = sampling.temperature == 0, list(sampling.stop_token_ids)
    return {
        "max_new_tokens": sampling.max_tokens - done,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
        "sampling_seed": sampling.seed,
        "stop_token_ids": stops,
        "ignore_eos": not stops,  # it makes SGLang ignore stop_token_ids as well
    }


def _outlive_sigquit() -> None:
    """SGLang's schedulers and its watchdog send SIGQUIT to this process when a scheduler ends. `_watch` tells instead."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    else:  # Python sets handlers in the main thread only, and an actor starts engines in another
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGQUIT, 1)  # SIG_IGN
