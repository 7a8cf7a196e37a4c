"""The Ray actor that owns one engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from trt_rl.arch import Arch
from trt_rl.config import Recipe
from trt_rl.errors import EngineLost
from trt_rl.placement import see_gpus
from trt_rl.refit.precision import PrecisionTable
from trt_rl.rollout.engine import Completion, Home, Request, make_engine


class EngineActor:
    """Serves one engine to the driver. Methods are coroutines, so generation and control interleave."""

    def __init__(self, recipe: Recipe, index: int, home: Home | None = None) -> None:
        self.recipe, self.index, self.home = recipe, index, home
        self._calls, self._busy_s, self._since = 0, 0.0, 0.0

    async def start(self, own_gpus: list[str], other_gpus: list[str]) -> str:
        """Bring the engine up without weights; returns the digest of its precision table.

        Args:
            own_gpus: of trainer ranks, to live on; none where Ray gave this actor its own.
            other_gpus: of trainer ranks on this node whose memory a refit reads.
        """
        recipe = self.recipe
        if own_gpus:
            see_gpus(own_gpus, other_gpus)
        arch = Arch.load(recipe.model.path)
        table = PrecisionTable.build(arch, recipe.refit.policy())
        options = dict(getattr(recipe.rollout, recipe.rollout.engine))
        if recipe.rollout.colocated:
            options["sleep"] = True
        self.engine = make_engine(recipe.rollout.engine, recipe.model.path, arch, table, recipe.rollout.layout(), options)
        self.engine.home = self.home
        await asyncio.to_thread(self.engine.start)
        return table.digest

    async def generate(self, requests: list[Request]) -> list[Completion]:
        if not self._calls:
            self._since = time.perf_counter()
        self._calls += 1
        try:
            return await self.engine.generate_many(requests)
        except EngineLost as error:
            context = ray.get_runtime_context()
            log = f"worker-{context.get_worker_id()}-*.err"
            raise EngineLost(f"{error}; what it said last is in {log} in Ray's session logs of node {context.get_node_id()}") from error
        finally:
            self._calls -= 1
            if not self._calls:
                self._busy_s += time.perf_counter() - self._since

    async def control(self, method: str, *args: Any) -> Any:
        """`pause`, `resume`, `sleep` or `wake`; see `RolloutEngine`."""
        return await asyncio.to_thread(getattr(self.engine, method), *args)

    async def refit(self, step: str, *args: Any) -> Any:
        """One step of a refit: connect, prepare, receive, commit or disconnect; see `RolloutEngine`."""
        return await asyncio.to_thread(getattr(self.engine, f"{step}_refit"), *args)

    async def health(self) -> dict[str, Any]:
        return self.engine.health()

    async def stats(self) -> dict[str, float]:
        """The engine's counters, and the seconds in which it had requests."""
        return self.engine.stats() | {"busy_s": round(self._busy_s, 4)}
