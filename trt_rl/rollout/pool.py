"""The driver's handle on all rollout engines: who serves which group, and what happens when an engine ends.

All samples of one prompt go to one engine, which shares their prefill. Groups are given to the engine with the fewest
queued tokens; with several engines the last quarter waits until some engine runs short, so that long samples on one do
not leave the others idle. Requests of an engine that ends are given to the others, from their beginning.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray

from trt_rl.config import Recipe
from trt_rl.errors import EngineLost, TrtRlError, WorkerDied, WorkerSilent
from trt_rl.observe.log import console
from trt_rl.placement import Places
from trt_rl.processes import gather, outcome_of, settle
from trt_rl.rollout.actor import EngineActor
from trt_rl.rollout.engine import Completion, Request

_AT_ONCE = 0.75  # of an engine's fair share is queued there before anything is known about how fast it is


@dataclass(eq=False)
class _Group:
    """Requests with one prompt: their places in the caller's list."""

    rows: list[int]
    tokens: int
    """At most, prompt once and all samples."""


@dataclass
class RolloutPool:
    recipe: Recipe
    actors: list[ray.actor.ActorHandle]
    places: Places
    serving: list[int] = field(default_factory=list)
    """Engines that get requests. One that failed a refit is left out until a later refit commits there."""
    lost: dict[int, str] = field(default_factory=dict)
    """Engines that ended, and how."""
    reissued: int = 0
    """Requests given to another engine because theirs ended."""

    def __post_init__(self) -> None:
        self.serving = list(range(len(self.actors)))

    @classmethod
    def start(cls, recipe: Recipe, places: Places) -> RolloutPool:
        """Create one actor an engine; `begin_build` brings the engines up."""
        actor = ray.remote(EngineActor)
        named = [actor.options(name=f"engine-{i}", **place.options) for i, place in enumerate(places.engines)]
        return cls(recipe, [a.remote(recipe, i, places.engines[i].home) for i, a in enumerate(named)], places)

    def begin_build(self, trainer_gpus: list[str]) -> list[ray.ObjectRef]:
        """Start bringing engines up; the results are digests of their precision tables.

        Args:
            trainer_gpus: of every trainer rank, as its node numbers them.
        """
        refs = []
        for actor, place in zip(self.actors, self.places.engines, strict=True):
            own = [trainer_gpus[rank] for rank in place.shares or () if trainer_gpus[rank]]
            near = [gpu for gpu, node in zip(trainer_gpus, self.places.trainer.nodes, strict=True) if node == place.nodes[0]]
            refs.append(actor.start.remote(own, near if own else []))
        return refs

    # --- generation --------------------------------------------------------------------------------------------

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Continue every request; results in order.

        Raises:
            EngineError: a request was refused.
            EngineLost: every engine has ended.
        """
        groups: dict[tuple[int, ...], _Group] = {}
        for row, request in enumerate(requests):
            group = groups.setdefault(request.prompt, _Group([], len(request.prompt)))
            group.rows.append(row)
            group.tokens += request.sampling.max_tokens
        waiting, results = deque(groups.values()), [None] * len(requests)
        queued = dict.fromkeys(self.serving, 0)
        under_way: dict[ray.ObjectRef, tuple[int, list[_Group]]] = {}
        while waiting or under_way:
            self._hand_out(waiting, queued, under_way, requests)
            done, _ = ray.wait(list(under_way), num_returns=1, timeout=self.recipe.run.wait_s)
            if not done:
                names = ", ".join(f"engine {i}" for i in sorted({i for i, _ in under_way.values()}))
                raise WorkerSilent(f"no answer within {self.recipe.run.wait_s:.0f} s from: {names}")
            engine, given = under_way.pop(done[0])
            completions = outcome_of(done[0], f"engine {engine}")
            rows = [row for group in given for row in group.rows]
            if isinstance(completions, (EngineLost, WorkerDied)):
                self.lose(engine, str(completions))
                queued.pop(engine, None)
                self.reissued += len(rows)
                waiting.extendleft(reversed(given))
                continue
            if isinstance(completions, TrtRlError):
                raise completions
            if engine in queued:
                queued[engine] -= sum(group.tokens for group in given)
            for row, completion in zip(rows, completions, strict=True):
                results[row] = completion
        return results

    def _hand_out(self, waiting: deque, queued: dict[int, int], under_way: dict, requests: list[Request]) -> None:
        """Give waiting groups to the engines with the fewest queued tokens."""
        if not queued:
            raise EngineLost("no engine is left: " + ("; ".join(self.lost.values()) or "none has taken the last refit"))
        total = sum(group.tokens for group in waiting) + sum(queued.values())
        room = total if len(queued) == 1 else total / len(queued) * _AT_ONCE
        given: dict[int, list[_Group]] = {}
        while waiting:
            engine = min(queued, key=lambda i: (queued[i], i))
            if queued[engine] and queued[engine] + waiting[0].tokens > room:
                break
            group = waiting.popleft()
            queued[engine] += group.tokens
            given.setdefault(engine, []).append(group)
        for engine, groups in given.items():
            # An engine alone takes all in one call and admits them at one stroke; of several, each group reports by itself.
            for call in [groups] if len(queued) == 1 else [[group] for group in groups]:
                ref = self.actors[engine].generate.remote([requests[row] for group in call for row in group.rows])
                under_way[ref] = (engine, call)

    def lose(self, engine: int, why: str) -> None:
        """Go on without an engine that has ended. What is left of it ends too: a worker that lives on would keep its GPU's memory."""
        if engine in self.lost:
            return
        self.lost[engine] = why
        self.serving = [i for i in self.serving if i != engine]
        ray.kill(self.actors[engine])
        console.print(f"engine {engine} has ended and its requests go to the others: {why}")

    # --- control -----------------------------------------------------------------------------------------------

    def pause(self, mode: str = "drain") -> None:
        self._control("pause", mode)

    def resume(self) -> None:
        self._control("resume")

    def sleep(self) -> None:
        self._control("sleep")

    def wake(self, what: str, engines: list[int]) -> None:
        """`weights` before a refit, `kv_cache` after it. An engine that cannot says so when it is asked for anything."""
        settle([self.actors[i].control.remote("wake", what) for i in engines], [f"engine {i}" for i in engines], self.recipe.run.wait_s)

    def _control(self, method: str, *args: Any) -> None:
        self._ask_serving("control", method, *args)

    def _ask_serving(self, method: str, *args: Any) -> list[Any]:
        """Call all serving engines. One that has ended is lost like one that ends while it generates; one that does not answer
        ends the run, because nobody knows what it holds."""
        asked, answers = list(self.serving), []
        refs = [getattr(self.actors[i], method).remote(*args) for i in asked]
        for engine, answer in zip(asked, settle(refs, [f"engine {i}" for i in asked], self.recipe.run.wait_s), strict=True):
            if isinstance(answer, (EngineLost, WorkerDied)) and not isinstance(answer, WorkerSilent):
                self.lose(engine, str(answer))
            elif isinstance(answer, TrtRlError):
                raise answer
            else:
                answers.append(answer)
        return answers

    def begin_refit(self, step: str, *args: Any, only: list[int] | None = None) -> list[ray.ObjectRef]:
        """Start one step of a refit on engines `only` without waiting; see `refit.session`."""
        return [self.actors[i].refit.remote(step, *args) for i in (range(len(self.actors)) if only is None else only)]

    def stats(self) -> list[dict[str, float]]:
        """Counters of every serving engine since it started."""
        return self._ask_serving("stats")

    def wait(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return gather(refs, [f"engine {i}" for i in self.serving], self.recipe.run.wait_s)
