"""The Ray actor that owns one engine."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from trt_rl.arch import Arch
from trt_rl.config import Recipe
from trt_rl.refit.precision import PrecisionTable
from trt_rl.rollout.engine import Completion, PauseMode, Request, make_engine


class EngineActor:
    """Serves one engine to the driver. Methods are coroutines, so generation and control interleave."""

    def __init__(self, recipe: Recipe, index: int) -> None:
        self.recipe, self.index = recipe, index

    async def start(self) -> str:
        """Bring the engine up without weights; returns the digest of its precision table."""
        recipe = self.recipe
        arch = Arch.load(recipe.model.path)
        table = PrecisionTable.build(arch, recipe.refit.policy())
        options = getattr(recipe.rollout, recipe.rollout.engine)
        self.engine = make_engine(recipe.rollout.engine, recipe.model.path, arch, table, recipe.rollout.layout(), options)
        await asyncio.to_thread(self.engine.start)
        return table.digest

    async def generate(self, requests: list[Request]) -> list[Completion]:
        return await self.engine.generate_many(requests)

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.to_thread(self.engine.pause, mode)

    async def resume(self) -> None:
        self.engine.resume()

    async def refit(self, step: str, *args: Any) -> Any:
        """One step of a refit: connect, prepare, receive, commit or disconnect; see `RolloutEngine`."""
        return await asyncio.to_thread(getattr(self.engine, f"{step}_refit"), *args)

    async def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    async def health(self) -> dict[str, Any]:
        return self.engine.health()

    async def stats(self) -> dict[str, float]:
        return self.engine.stats()
