"""The embedded engine: transformers' Qwen3 behind the engine interface, with continuous batching on any device.

A thread of its own runs the model. Each turn it prefills waiting prompts (every distinct prompt once, results
kept in a prefix cache) and then decodes one token for every running request. What transformers' own
continuous batching lacks is per-request seeds, temperatures and stop tokens; hence a scheduler of our own.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from trt_rl import cpu_gemm
from trt_rl.arch import Arch
from trt_rl.errors import EngineError, EngineLost, RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.landing import Landings, Place
from trt_rl.refit.member import Agreement, EngineMember
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.rollout.capabilities import CAPABILITIES, PauseMode
from trt_rl.rollout.engine import Completion, Request, RolloutEngine, request_problem
from trt_rl.rollout.hf_model import SlotCache, build
from trt_rl.rollout.sampling import sample


@dataclass(eq=False)  # a job is itself, whatever it holds
class _Job:
    request: Request
    result: Future
    done: Completion
    draw: random.Random
    slot: int = -1
    over: bool = False

    @property
    def room(self) -> int:
        """Positions the request may come to need."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.done.tokens)


@dataclass
class _Prefix:
    """A prefilled prompt: its keys and values, and the logits after its last token."""

    sequence: list[torch.Tensor]
    logits_V: torch.Tensor


class HFEngine(RolloutEngine):
    capabilities = CAPABILITIES["hf"]

    def __init__(
        self,
        model_path: str,
        arch: Arch,
        table: PrecisionTable,
        layout: EngineLayout,
        max_batch: int = 512,
        prefill_tokens: int = 8192,
        prefix_cache_prompts: int = 256,
        kv_cache_tokens: int = 262144,
    ) -> None:
        """
        Args:
            max_batch: requests decoded together.
            prefill_tokens: padded prompt tokens in one prefill pass.
            prefix_cache_prompts: distinct prompts whose prefill is kept until the weights change.
            kv_cache_tokens: room for running requests, each counted at the longest one's prompt + max_tokens.
        """
        self.model_path, self.arch, self.table = model_path, arch, table
        self.max_batch, self.prefill_tokens, self.prefix_limit = max_batch, prefill_tokens, prefix_cache_prompts
        self.kv_cache_tokens = kv_cache_tokens
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._prefixes: OrderedDict[tuple[int, ...], _Prefix] = OrderedDict()
        self._aborts: set[str] = set()
        self._paused: PauseMode | None = None
        self._stopping = False
        self._busy = False  # the thread is inside the model, outside the lock
        self._member: EngineMember | None = None
        self._turn = threading.Condition()
        self._stats = dict.fromkeys(("requests", "generated_tokens", "prefill_tokens", "cached_tokens", "prefix_hits", "decode_passes"), 0)

    # --- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if not torch.cuda.is_available():
            cpu_gemm.install()
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self.model, self.live = build(self.model_path, self.arch, self.table, device)
        self.cache = SlotCache(self.arch, device)
        self._thread = threading.Thread(target=self._loop, name="hf-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._turn:
            self._stopping = True
            self._turn.notify_all()
        self._thread.join()

    def health(self) -> dict[str, Any]:
        return {"version": self.version, "poisoned": self.poisoned, "alive": self._thread.is_alive()}

    def stats(self) -> dict[str, float]:
        with self._turn:
            return dict(self._stats)

    # --- requests ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        return await asyncio.wrap_future(self.submit([request])[0])

    async def generate_many(self, requests: list[Request]) -> list[Completion]:
        return list(await asyncio.gather(*map(asyncio.wrap_future, self.submit(requests))))

    def submit(self, requests: list[Request]) -> list[Future]:
        """Queue requests in one go, so that a batch does not depend on how fast they arrive."""
        for request in requests:
            if (problem := request_problem(request, self.arch)) is not None:
                raise EngineError(f"request {request.id}: {problem}")
        jobs = [_Job(r, Future(), Completion(r.id), random.Random(r.sampling.seed)) for r in requests]
        with self._turn:
            if self._stopping:
                raise EngineLost(f"the engine serves nothing: {self.poisoned or 'it is stopping'}")
            if self.poisoned:
                raise EngineError(f"the engine serves nothing: {self.poisoned}")
            self._waiting.extend(jobs)
            self._stats["requests"] += len(jobs)
            self._turn.notify_all()
        return [job.result for job in jobs]

    def abort(self, request_id: str) -> None:
        with self._turn:
            self._aborts.add(request_id)
            self._turn.notify_all()

    def pause(self, mode: PauseMode) -> None:
        if mode not in self.capabilities.pause_modes:
            raise EngineError(f"pause mode {mode!r} is unknown; modes: {', '.join(self.capabilities.pause_modes)}")
        with self._turn:
            self._paused = mode
            if mode == "abort":
                self._aborts.update(job.request.id for job in self._running)
            self._turn.notify_all()
            # `keep` leaves requests in their slots and waits for the pass in progress only.
            self._turn.wait_for(lambda: self._stopping or not (self._busy or (self._running and mode != "keep")))

    def resume(self) -> None:
        with self._turn:
            self._paused = None
            self._turn.notify_all()

    # --- refit -------------------------------------------------------------------------------------------------

    def agree_refit(self, agreement: Agreement, replica: int) -> list[str]:
        places = {name: Place(tuple((0, n) for n in view.shape), view) for name, view in self.live.items()}
        self._member = EngineMember(agreement, self.arch, self.table, Landings(places, replica, agreement.label(replica)))
        return [self._member.digest]

    def join_refit(self) -> None:
        self._member.join()

    def prepare_refit(self, version: int) -> None:
        with self._turn:
            if self._stopping:
                raise RefitError(f"the engine cannot take weights: {self.poisoned or 'it is stopping'}")
            self._refuse_older(version)
        if self._member is None:
            raise RefitError("the engine has not joined a refit group; join_refit comes first")
        self._member.prepare()

    def receive_refit(self, refit: Refit) -> list[dict[str, Any]]:
        with self._turn:
            running = len(self._running)
            self.poisoned = f"a refit to version {refit.version} has begun and not committed"
        try:
            if running:
                self._member.close()  # the trainer must not wait for this engine
                raise RefitError(f"{running} requests are running; pause the engine (drain or abort) before a refit")
            report = self._member.receive(refit)
        except RefitError as error:
            with self._turn:
                self.poisoned = f"a refit failed: {error}"
            raise
        self._received = refit.version
        return [report.as_dict()]

    def commit_refit(self, version: int) -> None:
        with self._turn:
            # In-flight keys and values are gone already: a refit is refused while requests run.
            super().commit_refit(version)
            self._turn.notify_all()

    def disconnect_refit(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None

    def reset_prefix_cache(self) -> None:
        with self._turn:
            self._prefixes.clear()

    # --- the engine's thread -----------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while True:
                with self._turn:
                    self._turn.wait_for(self._has_work)
                    if self._stopping:
                        break
                    self._finish_aborted()
                    admitted = [] if self._paused or self.poisoned else self._admit()
                    running = [] if self._paused == "keep" else list(self._running)
                    self._busy = True
                with torch.inference_mode():
                    fresh_jobs = set(admitted)
                    self._take(self._prefill(admitted))
                    self._decode([job for job in running if job not in fresh_jobs])
                with self._turn:
                    self._busy = False
                    self._deliver([job for job in self._running if job.over])
            self._fail_all(EngineLost("the engine was stopped"))
        except BaseException as error:  # whoever waits for a result must hear of any failure, whatever it is
            self._fail_all(EngineLost(f"the engine's thread failed: {error!r}"))
            raise

    def _has_work(self) -> bool:
        if self._stopping or self._aborts:
            return True
        if self._paused == "keep" or self.poisoned:
            return False
        return bool(self._running) or bool(self._waiting and not self._paused)

    def _finish_aborted(self) -> None:
        aborted = {j for j in (*self._running, *self._waiting) if j.request.id in self._aborts}
        self._aborts.clear()
        for job in aborted:
            job.done.finish = "abort"
        self._waiting = deque(job for job in self._waiting if job not in aborted)
        self._deliver(aborted)

    def _deliver(self, jobs: Collection[_Job]) -> None:
        """Hand results over, after the jobs have left: whoever gets a result may begin a refit at once."""
        gone = set(jobs)
        self._running = [job for job in self._running if job not in gone]
        self._turn.notify_all()
        for job in jobs:
            if job.result.set_running_or_notify_cancel():  # a caller may have given up waiting
                job.result.set_result(job.done)

    def _fail_all(self, error: EngineError) -> None:
        with self._turn:
            self.poisoned, self._stopping, self._busy = str(error), True, False
            for job in (*self._running, *self._waiting):
                if not job.result.done():
                    job.result.set_exception(error)
            self._running, self._waiting = [], deque()
            self._turn.notify_all()

    def _admit(self) -> list[_Job]:
        taken = {job.slot for job in self._running}
        free = (slot for slot in range(self.max_batch) if slot not in taken)
        admitted = []
        longest = max((job.room for job in self._running), default=0)
        while self._waiting and (slot := next(free, None)) is not None:
            longest = max(longest, self._waiting[0].room)
            if slot and (slot + 1) * longest > self.kv_cache_tokens:
                break
            job = self._waiting.popleft()
            job.slot = slot
            admitted.append(job)
        self._running.extend(admitted)
        if self._running:
            self.cache.reserve(max(j.slot for j in self._running) + 1, max(j.room for j in self._running))
        return admitted

    def _prefill(self, jobs: list[_Job]) -> list[tuple[_Job, torch.Tensor]]:
        """Fill the slots of `jobs`; returns the logits after each prompt."""
        by_prompt: dict[tuple[int, ...], list[_Job]] = {}
        for job in jobs:
            by_prompt.setdefault(job.request.prompt, []).append(job)
        missing = sorted((p for p in by_prompt if p not in self._prefixes), key=len)
        self._stats["prefix_hits"] += len(jobs) - len(missing)
        self._stats["cached_tokens"] += sum(len(job.request.prompt) for job in jobs) - sum(map(len, missing))
        known: dict[tuple[int, ...], _Prefix] = {p: self._prefixes[p] for p in by_prompt if p in self._prefixes}
        while missing:
            count = max(1, self.prefill_tokens // len(missing[-1]))
            batch, missing = missing[:count], missing[count:]
            known |= self._prefill_batch(batch)
        for prompt, prefix in known.items():
            self.cache.write([job.slot for job in by_prompt[prompt]], prefix.sequence)
            self._prefixes[prompt] = prefix
            self._prefixes.move_to_end(prompt)
        while len(self._prefixes) > self.prefix_limit:
            self._prefixes.popitem(last=False)
        return [(job, known[job.request.prompt].logits_V) for job in jobs]

    def _prefill_batch(self, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], _Prefix]:
        width = max(map(len, prompts))
        cache = SlotCache(self.arch, self.cache.device)
        cache.reserve(len(prompts), width)
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=cache.device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        rows = torch.arange(len(prompts), device=cache.device)
        positions = torch.arange(width, device=cache.device).expand(len(prompts), -1)
        last = torch.tensor([len(p) - 1 for p in prompts], device=cache.device)
        hidden = self._forward(tokens, positions, cache.at(rows, positions, width))
        logits = self.model.lm_head(hidden[rows, last])
        self._stats["prefill_tokens"] += sum(map(len, prompts))
        return {p: _Prefix(cache.read(i, len(p)), logits[i]) for i, p in enumerate(prompts)}

    def _decode(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        device = self.cache.device
        tokens = torch.tensor([[job.done.tokens[-1]] for job in jobs], device=device)
        positions = torch.tensor([[job.length - 1] for job in jobs], device=device)
        rows = torch.tensor([job.slot for job in jobs], device=device)
        width = max(job.length for job in jobs)
        hidden = self._forward(tokens, positions, self.cache.at(rows, positions, width))
        logits = self.model.lm_head(hidden[:, -1])
        self._stats["decode_passes"] += 1
        self._take(list(zip(jobs, logits, strict=True)))

    def _forward(self, tokens_B_S: torch.Tensor, positions_B_S: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Hidden states after the last norm. A query sees keys at its own position and before, in its own row."""
        columns = torch.arange(cache.width, device=cache.device)
        mask = (columns <= positions_B_S.unsqueeze(-1)).unsqueeze(1)
        return self.model.model(
            input_ids=tokens_B_S,
            position_ids=positions_B_S,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _take(self, results: list[tuple[_Job, torch.Tensor]]) -> None:
        """Sample one token for each job and finish those that are done."""
        if not results:
            return
        jobs = [job for job, _ in results]
        logits = torch.stack([row for _, row in results])
        tokens, logprobs = sample(logits, [j.request.sampling for j in jobs], [j.draw.random() for j in jobs])
        for job, token, logprob in zip(jobs, tokens, logprobs, strict=True):
            done, sampling = job.done, job.request.sampling
            done.tokens.append(token)
            done.logprobs.append(logprob)
            done.versions.append(self.version)
            if job.result.cancelled():
                job.over = True
            elif token in sampling.stop_token_ids:
                done.finish, job.over = "stop", True
            elif len(done.tokens) >= sampling.max_tokens:
                done.finish, job.over = "length", True
        self._stats["generated_tokens"] += len(jobs)
