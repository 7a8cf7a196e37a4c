"""Reward workers: user code in processes of its own, where it may raise, hang or crash without harm to the run."""

from __future__ import annotations

import faulthandler
import inspect
import math
import signal
import traceback
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

from trt_rl.config import RewardSettings
from trt_rl.dotted import load_function
from trt_rl.errors import RecipeError

_DEATHS = (ActorDiedError, ActorUnavailableError, OutOfMemoryError)
_GRACE_S = 1.0  # between asking a slow function to stop and ending its process


@dataclass(frozen=True)
class Score:
    """`value` is None when the function failed on this sample; `failure` then says how."""

    value: float | None
    failure: str | None = None


class _Timeout(BaseException):
    """Not an Exception, so that user code cannot swallow it with `except Exception`."""


class RewardActor:
    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.function = load_function(settings.function, "reward.function")
        # Signals reach the main thread, where Ray runs the methods of a plain actor.
        signal.signal(signal.SIGALRM, self._on_alarm)

    @staticmethod
    def _on_alarm(signum, frame):
        raise _Timeout

    def score(self, items: list[tuple[str, dict[str, Any]]]) -> list[Score]:
        return [self._score(response, row) for response, row in items]

    def _score(self, response: str, row: dict[str, Any]) -> Score:
        limit = self.settings.timeout_s
        # Code stuck outside Python never sees the alarm; this watchdog is a C thread that ends the process.
        faulthandler.dump_traceback_later(limit + _GRACE_S, exit=True)
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            value = float(self.function(response, row, **self.settings.args))
        except _Timeout:
            return Score(None, f"took longer than reward.timeout_s = {limit:g}")
        except Exception as error:  # noqa: BLE001  whatever user code raises costs its sample and is reported, never the run
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Score(None, f"raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        return Score(value) if math.isfinite(value) else Score(None, f"returned {value}")


def check_reward(settings: RewardSettings) -> None:
    """Raises:
    RecipeError: the function cannot be loaded, or cannot be called with a response, a row and `reward.args`.
    """
    function = load_function(settings.function, "reward.function")
    try:
        inspect.signature(function).bind("", {}, **settings.args)
    except TypeError as error:
        raise RecipeError(f"reward.args do not fit {settings.function}{inspect.signature(function)}: {error}") from error


class RewardPool:
    """Scores responses in order; a worker that dies is replaced and costs only the sample that killed it."""

    def __init__(self, settings: RewardSettings) -> None:
        check_reward(settings)
        self.settings = settings
        self._kind = ray.remote(num_cpus=0)(RewardActor)
        self._workers = [self._kind.remote(settings) for _ in range(settings.workers)]

    def score(self, items: list[tuple[str, dict[str, Any]]]) -> list[Score]:
        count = len(self._workers)
        shares = [items[i::count] for i in range(count)]
        refs = [worker.score.remote(share) for worker, share in zip(self._workers, shares, strict=True)]
        results: list[Score | None] = [None] * len(items)
        for i, ref in enumerate(refs):
            try:
                results[i::count] = ray.get(ref)
            except _DEATHS:
                self._replace(i)
                results[i::count] = [self._score_alone(i, item) for item in shares[i]]
        return results

    def _score_alone(self, worker: int, item: tuple[str, dict[str, Any]]) -> Score:
        try:
            return ray.get(self._workers[worker].score.remote([item]))[0]
        except _DEATHS:
            self._replace(worker)
            return Score(None, "ended or blocked its worker process")

    def _replace(self, worker: int) -> None:
        self._workers[worker] = self._kind.remote(self.settings)
