"""`tensorrt_llm.executor.result`: what a request becomes. Awaitable and, when streaming, iterable; bound to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import weakref
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.executor.utils import RequestError


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_token_ids_len: int = field(default=0, repr=False)
    _last_logprobs_len: int = field(default=0, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list:
        return self.logprobs[self._last_logprobs_len :]


class GenerationResult:
    def __init__(self, id: int, prompt_token_ids: list[int], sampling_params: Any, streaming: bool, executor: Any) -> None:
        self.id, self.prompt_token_ids, self.sampling_params, self._streaming = id, prompt_token_ids, sampling_params, streaming
        self._executor = weakref.ref(executor)
        self._outputs = [CompletionOutput(0)]
        self.cached_tokens = self.decoding_iter = 0
        self.context_logits = None
        self._done = self._aborted = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self.queue: Any = asyncio.Queue() if self._loop else queue.Queue()

    # --- from the executor's thread --------------------------------------------------------------------------------

    def put(self, response: dict | Exception) -> None:
        if self._loop is None:
            self.queue.put(response)
        else:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self.queue.put_nowait, response)

    # --- for the caller --------------------------------------------------------------------------------------------

    @property
    def request_id(self) -> int:
        return self.id

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        executor = self._executor()
        assert executor is not None, "The executor should be set for GenerationResult"
        executor.abort_request(self.id)
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def _handle(self, response: dict | Exception) -> None:
        if isinstance(response, Exception):
            self._done = True
            raise response
        if response["error"] is not None:
            self._done = True
            raise RequestError(response["error"])
        output, params = self._outputs[0], self.sampling_params
        output._last_token_ids_len, output._last_logprobs_len = len(output.token_ids), len(output.logprobs)
        output.token_ids.extend(response["tokens"])
        simple = getattr(params, "logprobs_simple_format", False) and params.logprobs == 0
        for token, entry in zip(response["tokens"], response["logprobs"], strict=False):
            if simple:
                output.logprobs.append(entry[token][0])
            else:
                output.logprobs.append({t: Logprob(logprob, rank) for t, (logprob, rank) in entry.items()})
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry[token][0]
        self.cached_tokens = response["cached_tokens"]
        reason = response["finish"]
        if reason is None:
            return
        self._done = True
        output.finish_reason = {"end_id": "stop", "stop_words": "stop"}.get(reason, reason)
        if reason == "stop_words":
            for stop, words in params._get_stop_reasons_and_words():
                if output.token_ids[-len(words) :] == words:
                    output.stop_reason = stop
                    if not params.include_stop_str_in_output:
                        output.token_ids = output.token_ids[: -len(words)]  # the log-probabilities keep theirs
                    break

    async def _aresult_step(self) -> None:
        assert self._loop is not None, (
            "The asyncio event loop was not present during initialization, so async operations are not available."
        )
        self._handle(await self.queue.get())

    async def aresult(self) -> GenerationResult:
        while not self._done:
            await self._aresult_step()
        return self

    def result(self, timeout: float | None = None) -> GenerationResult:
        while not self._done:
            self._handle(self.queue.get(timeout=timeout))
        return self

    def __await__(self):
        return self.aresult().__await__()

    def __aiter__(self):
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self
