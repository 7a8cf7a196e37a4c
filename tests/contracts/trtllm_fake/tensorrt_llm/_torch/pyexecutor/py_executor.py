"""`tensorrt_llm._torch.pyexecutor.py_executor`: the loop of one rank. Rank 0 decides what comes in and tells the others.

A control request ends the intake. With `drain` it fires once nothing runs any more; every rank then waits in its loop
until the caller, in another thread, is done.
"""

from __future__ import annotations

import queue
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tensorrt_llm import _family
from tensorrt_llm._torch.pyexecutor.sampler import finish_reason, sample
from tensorrt_llm._torch.virtual_memory import manager
from tensorrt_llm.logger import logger

NESTED_TIMEOUT_S = float(_family.knob("NESTED_TIMEOUT_S", "5"))


@dataclass(eq=False)
class LlmRequest:
    client_id: int
    prompt: list[int]
    params: Any
    max_tokens: int
    streaming: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict] = field(default_factory=list)
    slot: int = -1
    computed: int = 0  # prompt tokens whose keys are in the cache
    cached_tokens: int = 0
    sent: int = 0
    draw: random.Random | None = None

    @property
    def room(self) -> int:
        return len(self.prompt) + self.max_tokens


class ModelEngine:
    """`engine.model_engine`."""

    def __init__(self, model, model_loader) -> None:
        self.model, self.model_loader, self.moe_load_balancer = model, model_loader, None


class PyExecutor:
    def __init__(self, model_engine: ModelEngine, kv_cache_manager, args: Any, mapping, respond: Callable[[list], None]) -> None:
        self.model_engine, self.kv_cache_manager, self.args, self.mapping = model_engine, kv_cache_manager, args, mapping
        self.respond, self.is_shutdown, self.dead = respond, False, None
        self.active_requests: list[LlmRequest] = []
        self.waiting_queue: deque[LlmRequest] = deque()
        self.iteration = 0
        self._draw = random.Random(42)  # the same on every rank
        self._incoming: queue.Queue = queue.Queue()
        self._held: list = []  # arrived while a control request was pending
        self._control: bool | None = None  # the pending control request's `drain`
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._reached, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._event_loop, name="py_executor", daemon=True)
        self._thread.start()

    # --- what other threads call ---------------------------------------------------------------------------------

    def enqueue_request(self, request: LlmRequest) -> int:
        self._incoming.put(("new", request))
        if self.dead is not None:
            self._send(request, error=f"the executor loop ended: {self.dead}")
        return request.client_id

    def cancel_request(self, client_id: int) -> None:
        self._incoming.put(("cancel", client_id))

    def can_enqueue_requests(self) -> bool:
        return self.mapping.rank == 0 and self.dead is None

    def reset_prefix_cache(self) -> None:
        self.kv_cache_manager.reset_reuse_state()

    def is_idle(self) -> bool:
        return not self.active_requests and not self.waiting_queue

    @contextmanager
    def control_action(self, drain: bool = True) -> Iterator[PyExecutor]:
        """Hold the loop of this rank, and by rank 0's message of all, while the body runs."""
        me = threading.get_ident()
        if self._owner == me and _family.REENTRANCY_GUARD:
            raise RuntimeError("control_action() is not re-entrant: this thread is inside one already")
        if not self._lock.acquire(timeout=NESTED_TIMEOUT_S if self._owner == me else -1):
            raise TimeoutError("TRTLLM_FAKE: nested control_action; this release has no guard and would deadlock here")
        try:
            self._owner = me
            if self.dead or self.is_shutdown:
                raise RuntimeError(f"control_action(): the executor loop was shut down ({self.dead or 'shutdown'})")
            if self.mapping.rank == 0:
                self._incoming.put(("control", drain))
            while not self._reached.wait(0.1):
                if self.dead or self.is_shutdown:
                    raise RuntimeError(f"control_action(): the executor loop was shut down ({self.dead or 'shutdown'})")
            self._reached.clear()
            try:
                yield self
            finally:
                self._done.set()
        finally:
            self._owner = None
            self._lock.release()

    def shutdown(self) -> None:
        if self.mapping.rank == 0:
            self._incoming.put(("shutdown", None))
        self._thread.join(10)
        self.is_shutdown = True

    # --- the loop ------------------------------------------------------------------------------------------------

    def _event_loop(self) -> None:
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                while self._turn():
                    pass
            self._fail_all("the executor was shut down")
        except Exception as error:  # noqa: BLE001  whoever waits must hear of it
            self.dead = f"{type(error).__name__}: {error}"
            logger.error(traceback.format_exc())
            self._fail_all(f"Encountered an error in forward function: {error}")
        finally:
            self.is_shutdown = True

    def _turn(self) -> bool:
        items = self._receive()
        for i, (kind, what) in enumerate(items):
            if kind == "shutdown":
                return False
            if kind == "new":
                self.waiting_queue.append(what)
            elif kind == "cancel":
                self._cancel(what)
            else:
                self._control, self._held = what, items[i + 1 :]
                break
        if self._control is not None and (not self._control or self.is_idle()):
            self._control = None
            self._reached.set()
            while not self._done.wait(0.2):
                if self._stopping():
                    return False
            self._done.clear()
            return True
        self._admit()
        if self.active_requests:
            manager.require("model", "model_weights", "kv_cache")
            self._context_step()
            self._generation_step()
            self.iteration += 1
        return True

    def _stopping(self) -> bool:
        """A shutdown must not wait for a body that never ends (rank 0 only; others end with their process)."""
        with self._incoming.mutex:
            return any(kind == "shutdown" for kind, _ in self._incoming.queue)

    def _receive(self) -> list:
        """Rank 0's new items, on every rank. While a control request is pending nothing is taken in, aborts included."""
        items: list = []
        if self.mapping.rank == 0 and self._control is None:
            items, self._held = self._held, []
            if not items and self.is_idle():
                items.append(self._incoming.get())
            try:
                while True:
                    items.append(self._incoming.get_nowait())
            except queue.Empty:
                pass
        if self.mapping.world_size > 1:
            box = [items]
            dist.broadcast_object_list(box, src=0, group=self.mapping.group)
            items = box[0]
            if self.mapping.rank:
                self._held = []
        return items

    def _cancel(self, client_id: int) -> None:
        for request in [r for r in (*self.active_requests, *self.waiting_queue) if r.client_id == client_id]:
            self._finish(request, "cancelled")

    def _admit(self) -> None:
        taken = {r.slot for r in self.active_requests}
        while self.waiting_queue and len(self.active_requests) < self.args.max_batch_size:
            request = self.waiting_queue[0]
            if not self.kv_cache_manager.fits(request.room):
                if not self.active_requests:
                    self.waiting_queue.popleft()
                    self._send(request, error=f"{request.room} tokens do not fit the KV cache of {self.kv_cache_manager.max_tokens}")
                    continue
                break
            self.waiting_queue.popleft()
            request.slot = next(s for s in range(self.args.max_batch_size) if s not in taken)
            taken.add(request.slot)
            own = request.params.seed is not None and (_family.REQUEST_SEED or self.args.sampler_type == "TRTLLMSampler")
            request.draw = random.Random(request.params.seed) if own else self._draw
            self.active_requests.append(request)

    def _context_step(self) -> None:
        budget, batch = self.args.max_num_tokens, []
        for request in [r for r in self.active_requests if not r.tokens]:
            if request.computed == 0 and request.cached_tokens == 0:
                # Looked up when scheduled: prompts of one batch do not share, those of earlier ones do.
                request.cached_tokens = request.computed = self.kv_cache_manager.add_sequence(request.prompt, request.room, request.slot)
            left = len(request.prompt) - request.computed
            if left > budget and not self.args.enable_chunked_prefill:
                break
            if (count := min(left, budget)) > 0:
                batch.append((request, count))
                budget -= count
        if not batch:
            return
        self._agree([(r.client_id, r.computed) for r, _ in batch])
        width = max(count for _, count in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, (request, count) in enumerate(batch):
            tokens[row, :count] = torch.tensor(request.prompt[request.computed : request.computed + count])
        starts = torch.tensor([[r.computed] for r, _ in batch])
        logits = self._forward([r for r, _ in batch], tokens, starts + torch.arange(width), torch.tensor([c - 1 for _, c in batch]))
        for (request, count), row in zip(batch, logits, strict=True):
            request.computed += count
            if request.computed == len(request.prompt):
                self.kv_cache_manager.store(request.slot, request.prompt, allow_partial=False)
                self._take(request, row)

    def _generation_step(self) -> None:
        running = [r for r in self.active_requests if r.tokens]
        if not running:
            return
        positions = torch.tensor([[len(r.prompt) + len(r.tokens) - 1] for r in running])
        logits = self._forward(running, torch.tensor([[r.tokens[-1]] for r in running]), positions, torch.zeros(len(running), dtype=int))
        for request, row in zip(running, logits, strict=True):
            self._take(request, row)

    def _forward(self, requests: list[LlmRequest], tokens, positions, last) -> torch.Tensor:
        rows = torch.tensor([r.slot for r in requests])
        return self.model_engine.model(tokens, positions, last, self.kv_cache_manager.at(rows, positions))

    def _agree(self, plan: list) -> None:
        """Ranks that reuse different prefixes compute nonsense or hang; here that is an error."""
        if self.mapping.world_size > 1:
            plans: list = [None] * self.mapping.world_size
            dist.all_gather_object(plans, plan, group=self.mapping.group)
            if any(p != plan for p in plans):
                raise RuntimeError(f"TRTLLM_FAKE: ranks reuse different prefixes {plans}; reset_prefix_cache must run on every rank")

    def _take(self, request: LlmRequest, logits: torch.Tensor) -> None:
        token, logprobs = sample(logits, request.params, request.draw.random())
        request.tokens.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        reason = finish_reason(request.tokens, request.params, request.max_tokens)
        if reason is not None:
            self._finish(request, reason)
        elif request.streaming and (len(request.tokens) - request.sent) >= self.args.stream_interval:
            self._send(request)

    def _finish(self, request: LlmRequest, reason: str) -> None:
        if request in self.active_requests:
            self.active_requests.remove(request)
            if request.slot in self.kv_cache_manager.rooms:
                known = request.computed if not request.tokens else len(request.prompt) + len(request.tokens) - 1
                self.kv_cache_manager.free(request.slot, [*request.prompt, *request.tokens][:known])
        else:
            self.waiting_queue.remove(request)
        self._send(request, reason)

    def _send(self, request: LlmRequest, reason: str | None = None, error: str | None = None) -> None:
        if self.mapping.rank == 0:
            new = slice(request.sent, None)
            message = {"client_id": request.client_id, "tokens": request.tokens[new], "logprobs": request.logprobs[new]}
            self.respond([message | {"finish": reason, "error": error, "cached_tokens": request.cached_tokens}])
        request.sent = len(request.tokens)

    def _fail_all(self, message: str) -> None:
        """Everything known, and everything that still arrives, ends with an error."""
        late = [what for kind, what in [*self._held, *list(self._incoming.queue)] if kind == "new"]
        for request in [*self.active_requests, *self.waiting_queue, *late]:
            self._send(request, error=message)
        self.active_requests, self.waiting_queue = [], deque()
