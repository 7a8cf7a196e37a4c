"""`with span("generate"):` is the only way time is measured. Spans of one step add up by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Spans:
    """Seconds by span name, for the current step and for the whole run.

    A span inside another is part of it and is not counted again, so the seconds of all names add up to time spent.
    """

    def __init__(self) -> None:
        self.step: dict[str, float] = {}
        self.total: dict[str, float] = {}
        self._inside = False

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._inside:
            yield
            return
        start, self._inside = time.perf_counter(), True
        try:
            yield
        finally:
            seconds, self._inside = time.perf_counter() - start, False
            for sums in (self.step, self.total):
                sums[name] = sums.get(name, 0.0) + seconds

    def reset(self) -> None:
        """Forget everything, at the beginning of a run."""
        self.step, self.total, self._inside = {}, {}, False

    def take_step(self) -> dict[str, float]:
        """Spans since the last call."""
        taken, self.step = self.step, {}
        return taken


span = Spans()
