"""The interface every rollout engine implements, and the names they are known by.

An engine owns model weights that only a refit can change. It takes token ids and gives token ids with the
log-probability of each under the distribution that sampled it. It never imports megatron.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from trt_rl.arch import Arch
from trt_rl.config import SamplingSettings
from trt_rl.dotted import load_registered
from trt_rl.errors import EngineError, RefitError
from trt_rl.layout import EngineLayout
from trt_rl.refit.member import Agreement
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.rollout.capabilities import Capabilities, PauseMode

SEEDS = 2**63
"""Seeds are below it: engines keep them in signed numbers of 64 bits."""


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. `temperature == 0` is greedy; `top_k == 0` keeps all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, settings: SamplingSettings, stop_token_ids: tuple[int, ...], seed: int) -> Sampling:
        return cls(stop_token_ids=stop_token_ids, seed=seed, **settings.model_dump())

    def problem(self) -> str | None:
        """What is wrong with these values, or None."""
        if self.temperature < 0:
            return f"temperature = {self.temperature} must be at least 0"
        if not 0 < self.top_p <= 1:
            return f"top_p = {self.top_p} must be in (0, 1]"
        if self.top_k < 0:
            return f"top_k = {self.top_k} must be at least 0 (0 keeps all tokens)"
        if self.max_tokens < 1:
            return f"max_tokens = {self.max_tokens} must be at least 1"
        if not 0 <= self.seed < SEEDS:
            return f"seed = {self.seed} must be at least 0 and below 2**63"
        return None


@dataclass(frozen=True)
class Home:
    """Where an engine that places its own workers is to put them: rank r in bundle `bundles[r]`."""

    group: Any
    """A Ray placement group."""
    bundles: tuple[int, ...]
    gpu_share: float | None = None
    """Of a GPU, for each worker; None takes the engine's default of a whole one."""


@dataclass(frozen=True)
class Request:
    """One prompt to be continued once. Requests that share a prompt share its prefill."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass
class Completion:
    """What an engine made of a request. Stop tokens stay in `tokens`; an aborted request keeps what it had."""

    id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token, under the distribution that sampled it; of greedy tokens, under the plain softmax."""
    versions: list[int] = field(default_factory=list)
    """Weight version that sampled each token."""
    finish: Literal["stop", "length", "abort"] = "length"


def request_problem(request: Request, arch: Arch) -> str | None:
    """What is wrong with a request, whatever the engine; None if nothing is."""
    prompt, limit = request.prompt, arch.max_positions
    if not prompt:
        return "the prompt is empty"
    if bad := [t for t in prompt if not 0 <= t < arch.vocab]:
        return f"token id {bad[0]} is outside the vocabulary of {arch.vocab}"
    if (problem := request.sampling.problem()) is None and len(prompt) + request.sampling.max_tokens > limit:
        problem = f"prompt of {len(prompt)} + max_tokens {request.sampling.max_tokens} exceeds the model's {limit} positions"
    return problem


class RolloutEngine(ABC):
    """An engine inside its own process. Methods may be called from any thread; `generate` from an event loop."""

    capabilities: Capabilities
    home: Home | None = None
    """Set before `start` where `capabilities.places_workers`."""
    version: int | None = None
    """Of the weights that are served."""
    poisoned: str | None = "no weights yet: the first refit has not committed"
    """Why nothing is served."""
    _received: int | None = None  # verified, not committed

    @abstractmethod
    def start(self) -> None:
        """Bring the model up without weights. Nothing is served until a first refit commits."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Continue one prompt.

        Raises:
            EngineError: bad sampling values, an empty or over-long prompt, or no committed weights.
            EngineLost: the engine or one of its workers ended; the request may be given to another engine.
        """

    async def generate_many(self, requests: list[Request]) -> list[Completion]:
        """Continue several prompts; results in order. An engine that batches may take them in at one stroke."""
        return list(await asyncio.gather(*map(self.generate, requests)))

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request early; its `generate` returns what it has. Unknown ids are ignored."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Stop generating: after running requests finish (`drain`), at once with partial results (`abort`), or
        at once and to be continued (`keep`). New requests wait. Returns when nothing runs any more."""

    @abstractmethod
    def resume(self) -> None: ...

    def sleep(self) -> None:
        """Give GPU memory of weights and KV cache back. The engine serves nothing until `wake` and a refit that commits.

        Raises:
            EngineError: requests are running, or the engine cannot sleep.
        """
        raise EngineError("this engine cannot sleep")

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take memory again: for weights before a refit, for the KV cache after it."""
        raise EngineError("this engine cannot sleep")

    @abstractmethod
    def agree_refit(self, agreement: Agreement, replica: int) -> list[str]:
        """Make every worker a member of the refit, as the `replica`-th engine that takes part.

        Returns:
            Each worker's digest of precision table and route.

        Raises:
            RefitError: the route would not write every value of every live tensor exactly once.
        """

    @abstractmethod
    def join_refit(self) -> None:
        """Join the link with every worker. Collective."""

    @abstractmethod
    def prepare_refit(self, version: int) -> None:
        """Reserve what the transfer needs. The engine still serves what it served.

        Raises:
            RefitError: `version` is not newer than the committed one, or there is not enough memory.
        """

    @abstractmethod
    def receive_refit(self, refit: Refit) -> list[dict[str, Any]]:
        """Take all buckets into the live tensors of every worker and verify them; the workers' reports. From here to
        `commit_refit` the engine is poisoned: it serves nothing.

        Raises:
            RefitError: requests are running, or what arrived is not what was sent. The engine stays poisoned.
        """

    def commit_refit(self, version: int) -> None:
        """Drop caches of the old version and serve the new one, which every worker has verified.

        Raises:
            RefitError: another version was received, or the caches stay.
        """
        if self._received != version:
            raise RefitError(f"commit of version {version}, but version {self._received} was received")
        self.reset_prefix_cache()
        self.version, self.poisoned, self._received = version, None, None

    def _refuse_older(self, version: int) -> None:
        """Raise unless `version` is newer than what is served."""
        if self.version is not None and version <= self.version:
            raise RefitError(f"version {version} is not newer than the engine's {self.version}")

    @abstractmethod
    def disconnect_refit(self) -> None:
        """Leave the refit group."""

    @abstractmethod
    def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """`version` (None before the first commit), `poisoned` (reason or None)."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters since start."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine; waiting requests fail with an EngineError."""


ENGINES = {
    "trtllm": "trt_rl.rollout.trtllm:TrtllmEngine",
    "vllm": "trt_rl.rollout.vllm:VllmEngine",
    "sglang": "trt_rl.rollout.sglang:SglangEngine",
    "hf": "trt_rl.rollout.hf:HFEngine",
}


def make_engine(
    name: str, model_path: str, arch: Arch, table: PrecisionTable, layout: EngineLayout, options: dict[str, Any]
) -> RolloutEngine:
    """Import the engine's module, only now, and construct it.

    Raises:
        EngineError: the name is unknown, its package cannot be imported, or it rejects an option.
    """
    kind = load_registered(ENGINES, name, "rollout.engine", "engines", EngineError)
    if missing := {f for f in table.formats.values() if f not in kind.capabilities.formats}:
        raise EngineError(f"rollout.engine = {name!r} cannot hold {', '.join(missing)}; it holds {', '.join(kind.capabilities.formats)}")
    parameters = inspect.signature(kind).parameters
    allowed = list(parameters)[4:]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())  # the library checks its own names
    if not takes_any and (unknown := sorted(options.keys() - set(allowed))):
        raise EngineError(f"rollout.{name}.{unknown[0]} is no option of this engine; its options: {', '.join(allowed)}")
    return kind(model_path, arch, table, layout, **options)
