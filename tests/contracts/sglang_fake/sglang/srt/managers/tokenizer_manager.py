"""The part of SGLang that lives in the caller's process: requests in, outputs back, control calls with one answer a scheduler."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers import io_struct as io


@dataclass
class _State:
    event: asyncio.Event = field(default_factory=asyncio.Event)
    out: dict[str, Any] | None = None


class RWLock:
    def __init__(self) -> None:
        self._cond, self._readers, self._waiting_writers, self._writing = asyncio.Condition(), 0, 0, False

    @asynccontextmanager
    async def reader_lock(self):
        async with self._cond:
            await self._cond.wait_for(lambda: not (self._writing or self._waiting_writers))
            self._readers += 1
        try:
            yield
        finally:
            async with self._cond:
                self._readers -= 1
                self._cond.notify_all()

    @asynccontextmanager
    async def writer_lock(self):
        async with self._cond:
            self._waiting_writers += 1
            await self._cond.wait_for(lambda: not (self._writing or self._readers))
            self._waiting_writers -= 1
            self._writing = True
        try:
            yield
        finally:
            async with self._cond:
                self._writing = False
                self._cond.notify_all()


class TokenizerManager:
    def __init__(self, server_args, pipes) -> None:
        self.server_args, self.pipes = server_args, pipes
        self.max_req_input_len: int | None = None
        self.rid_to_state: dict[str, _State] = {}
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.is_pause, self.is_pause_cond, self.model_update_lock = False, asyncio.Condition(), RWLock()
        self._control, self._answer = asyncio.Lock(), None

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is None:
            self.event_loop = asyncio.get_running_loop()
            threading.Thread(target=self._handle_loop, daemon=True).start()

    def _handle_loop(self) -> None:
        """Outputs and answers come from rank 0 alone."""
        try:
            while True:
                self.event_loop.call_soon_threadsafe(self._handle, self.pipes[0].recv())
        except (EOFError, OSError, RuntimeError):  # the scheduler or the loop has ended: whoever waits, waits on
            return

    def _handle(self, message: Any) -> None:
        if isinstance(message, dict):
            if (state := self.rid_to_state.pop(message["meta_info"]["id"], None)) is not None:
                state.out = message
                state.event.set()
        elif self._answer is not None:
            self._answer.set_result(message)

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(obj)
            except OSError:
                logging.getLogger(__name__).warning("a scheduler has ended; %s is lost", type(obj).__name__)  # as ZMQ loses it

    async def _communicate(self, obj: Any) -> Any:
        self.auto_create_handle_loop()
        async with self._control:
            self._answer = self.event_loop.create_future()
            self._dispatch_to_scheduler(obj)
            try:
                return await self._answer
            finally:
                self._answer = None

    async def generate_request(self, obj: io.GenerateReqInput, request: Any = None):
        self.auto_create_handle_loop()
        obj.normalize_batch_and_arguments()
        if obj.rid in self.rid_to_state:
            raise ValueError(f"Duplicate request ID detected: {obj.rid}")
        self.rid_to_state[obj.rid] = state = _State()
        try:
            async with self.is_pause_cond:
                await self.is_pause_cond.wait_for(lambda: not self.is_pause)
            async with self.model_update_lock.reader_lock():
                self._validate(obj)
                self._dispatch_to_scheduler(obj)
                await state.event.wait()
                reason = state.out["meta_info"]["finish_reason"]
                if reason["type"] == "abort" and reason.get("status_code") == 400:
                    raise ValueError(reason["message"])
                yield state.out
        except Exception:
            self.rid_to_state.pop(obj.rid, None)
            raise

    def _validate(self, obj: io.GenerateReqInput) -> None:
        length, context = len(obj.input_ids), self.server_args.context_len
        if length >= context:
            raise ValueError(f"The input ({length} tokens) is longer than the model's context length ({context} tokens).")
        if length + obj.sampling_params.get("max_new_tokens", 128) > context:
            raise ValueError(f"Requested token count exceeds the model's maximum context length of {context} tokens.")
        check_sampling(obj.sampling_params)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        if not abort_all and (not rid or rid not in self.rid_to_state):
            return
        self._dispatch_to_scheduler(io.AbortReq(rid=rid, abort_all=abort_all))

    async def pause_generation(self, obj: io.PauseGenerationReqInput) -> None:
        async with self.is_pause_cond:
            self.is_pause = True
            assert obj.mode == "in_place", "the stand-in pauses in place"
            self._dispatch_to_scheduler(obj)

    async def continue_generation(self, obj: io.ContinueGenerationReqInput) -> None:
        async with self.is_pause_cond:
            self.is_pause = False
            self._dispatch_to_scheduler(obj)
            self.is_pause_cond.notify_all()

    async def flush_cache(self, timeout_s: float | None = None) -> io.FlushCacheReqOutput:
        return await self._communicate(io.FlushCacheReqInput(timeout_s=timeout_s))

    async def update_weights_from_tensor(self, obj: io.UpdateWeightsFromTensorReqInput, request: Any = None) -> tuple[bool, str]:
        async with self.is_pause_cond:
            if is_paused := self.is_pause:
                answer = await self._communicate(obj)
        if not is_paused:
            async with self.model_update_lock.writer_lock():
                answer = await self._communicate(obj)
        return answer.success, answer.message

    async def release_memory_occupation(self, obj: io.ReleaseMemoryOccupationReqInput, request: Any = None) -> None:
        await self._communicate(obj)

    async def resume_memory_occupation(self, obj: io.ResumeMemoryOccupationReqInput, request: Any = None) -> None:
        await self._communicate(obj)

    async def check_weights(self, obj: io.CheckWeightsReqInput, request: Any = None) -> tuple:
        answer = await self._communicate(obj)
        return answer.success, answer.message, answer.payload, None


def check_sampling(params: dict[str, Any]) -> None:
    """`SamplingParams.verify`, and msgspec's refusal of unknown names."""
    known = {"max_new_tokens", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "sampling_seed", "n", "stop", "min_new_tokens"}  # fmt: skip
    if unknown := params.keys() - known:
        raise TypeError(f"Unexpected keyword argument '{min(unknown)}'")
    top_k, top_p, temperature = params.get("top_k", -1), params.get("top_p", 1.0), params.get("temperature", 1.0)
    if temperature < 0:
        raise ValueError(f"temperature must be a non-negative finite number, got {temperature}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}.")
    if top_k != -1 and top_k < 1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
