"""What the adapters of engine packages have in common: the package lives on an event loop in a thread of its own, so that every
method of the adapter may be called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any

from trt_rl.arch import Arch
from trt_rl.errors import EngineLost
from trt_rl.layout import EngineLayout
from trt_rl.refit.precision import PrecisionTable
from trt_rl.rollout.engine import Completion, Request, RolloutEngine


class HostedEngine(RolloutEngine):
    wait_s = 600.0
    """For one answer of the package to a control call."""

    def __init__(
        self, model_path: str, arch: Arch, table: PrecisionTable, layout: EngineLayout, sleep: bool = False, **options: Any
    ) -> None:
        """
        Args:
            sleep: start the engine so that it can sleep.
            options: settings of the package under its own names.
        """
        self.model_path, self.arch, self.table, self.layout = model_path, arch, table, EngineLayout(layout.tp, layout.ep)
        self.can_sleep, self.options = sleep, options
        self._asleep: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # there from `start` to `stop`
        self._lost: asyncio.Future | None = None  # of packages that do not tell by themselves that a process has ended
        self._lock = threading.Lock()
        self._stats = dict.fromkeys(("requests", "generated_tokens", "prefill_tokens", "cached_tokens", "continued"), 0)

    def _start_loop(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True).start()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None

    def _wait(self, work: Coroutine) -> Any:
        """The result of `work`, done on the loop. Not to be called there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self.wait_s)

    async def generate(self, request: Request) -> Completion:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._generate(request), self._loop))

    @abstractmethod
    async def _generate(self, request: Request) -> Completion:
        """`generate`, on the loop."""

    def stop(self) -> None:
        if self._loop is None:  # it never started
            return
        self._end()
        self._stop_loop()

    @abstractmethod
    def _end(self) -> None:
        """Shut the package down; waiting requests fail."""

    def _fail(self, error: EngineLost) -> EngineLost:
        """End all that waits for `_lost` with `error`; the engine serves nothing any more."""

        def tell() -> None:
            if not self._lost.done():
                self._lost.set_exception(error)
                self._lost.exception()  # whoever waits raises it; nobody may be waiting
            self.poisoned = str(error)  # not before: a request that finds the reason finds the engine lost as well

        self._loop.call_soon_threadsafe(tell)
        return error

    @property
    def alive(self) -> bool:
        """False once the package or one of its processes has ended. Asked between `start` and `stop`."""
        return not self._lost.done()

    def health(self) -> dict[str, Any]:
        alive = self._loop is not None and self.alive
        return {"version": self.version, "poisoned": self.poisoned, "asleep": sorted(self._asleep), "alive": alive}

    def stats(self) -> dict[str, float]:
        with self._lock:
            return dict(self._stats)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._stats[name] += amount
