"""The Ray actor that owns one engine."""

from __future__ import annotations

import asyncio

from trt_rl.arch import Arch
from trt_rl.config import Recipe
from trt_rl.errors import RefitError
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.transport import GlooLink
from trt_rl.rollout.engine import Completion, PauseMode, Request, make_engine


class EngineActor:
    """Serves one engine to the driver. Methods are coroutines, so generation and control interleave."""

    def __init__(self, recipe: Recipe, index: int) -> None:
        self.recipe, self.index = recipe, index

    async def start(self) -> str:
        """Bring the engine up without weights; returns the digest of its precision table."""
        recipe = self.recipe
        arch = Arch.load(recipe.model.path)
        table = PrecisionTable.build(arch, recipe.refit.format, tuple(recipe.refit.exclude))
        options = getattr(recipe.rollout, recipe.rollout.engine)
        self.engine = make_engine(recipe.rollout.engine, recipe.model.path, arch, table, options)
        await asyncio.to_thread(self.engine.start)
        return table.digest

    async def generate(self, requests: list[Request]) -> list[Completion]:
        return await self.engine.generate_many(requests)

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.to_thread(self.engine.pause, mode)

    async def resume(self) -> None:
        self.engine.resume()

    async def connect(self, host: str, port: int, senders: int, members: int) -> None:
        """Join the refit group behind the `senders` trainer ranks. Collective."""
        self.senders = senders
        timeout = self.recipe.refit.timeout_s
        self.link = await asyncio.to_thread(GlooLink, host, port, senders + self.index, members, timeout)

    async def receive_weights(self, version: int) -> dict[str, float]:
        """Take one version from the trainer and commit it. On any failure the engine is left poisoned."""
        return await asyncio.to_thread(self._receive_weights, version)

    def _receive_weights(self, version: int) -> dict[str, float]:
        # Whatever fails here, the senders are heard to their end, or they would wait for this engine.
        failure: RefitError | None = None
        begun = False
        try:
            self.engine.begin_refit(version)
            begun = True
        except RefitError as error:
            failure = error
        try:
            for bucket in self.link.receive(self.senders, version):
                if failure is None:
                    try:
                        self.engine.load_bucket(bucket)
                    except RefitError as error:
                        failure = error
            if failure is None:
                return self.engine.commit_refit(version)
        except RefitError as error:
            failure = error
        if begun:  # an engine that refused to begin still holds its old weights, whole
            self.engine.abort_refit(str(failure))
        raise failure

    async def stats(self) -> dict[str, float]:
        return self.engine.stats()
