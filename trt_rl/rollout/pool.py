"""The driver's handle on all rollout engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ray

from trt_rl.config import Recipe
from trt_rl.processes import gather, gpus_per_actor
from trt_rl.rollout.actor import EngineActor
from trt_rl.rollout.engine import Completion, Request


@dataclass
class RolloutPool:
    recipe: Recipe
    actors: list[ray.actor.ActorHandle]
    serving: list[int] = field(default_factory=list)
    """Engines that get requests. One that failed a refit is left out until a later refit commits there."""

    def __post_init__(self) -> None:
        self.serving = list(range(len(self.actors)))

    @classmethod
    def start(cls, recipe: Recipe) -> RolloutPool:
        """Create one actor an engine; `build` brings the engines up."""
        actor = ray.remote(num_cpus=1, num_gpus=gpus_per_actor())(EngineActor)
        return cls(recipe, [actor.options(name=f"engine-{i}").remote(recipe, i) for i in range(recipe.rollout.replicas)])

    def begin_build(self) -> list[ray.ObjectRef]:
        """Start bringing engines up; the results are digests of their precision tables."""
        return [actor.start.remote() for actor in self.actors]

    def generate(self, requests: list[Request]) -> list[Completion]:
        """Continue every request; results in order. Requests with one prompt go to one engine, which shares its prefill."""
        actors, home = self._serving(), {}
        for request in requests:
            home.setdefault(request.prompt, len(home) % len(actors))
        shares: list[list[int]] = [[] for _ in actors]
        for i, request in enumerate(requests):
            shares[home[request.prompt]].append(i)
        refs = [actor.generate.remote([requests[i] for i in share]) for actor, share in zip(actors, shares, strict=True)]
        results: list[Completion | None] = [None] * len(requests)
        for share, completions in zip(shares, self.wait(refs), strict=True):
            for i, completion in zip(share, completions, strict=True):
                results[i] = completion
        return results

    def pause(self, mode: str = "drain") -> None:
        self.wait([actor.pause.remote(mode) for actor in self._serving()])

    def resume(self) -> None:
        self.wait([actor.resume.remote() for actor in self._serving()])

    def nodes(self) -> list[str]:
        """Ray node of every engine."""
        return self.wait([actor.node.remote() for actor in self.actors])

    def begin_refit(self, step: str, *args: Any, only: list[int] | None = None) -> list[ray.ObjectRef]:
        """Start one step of a refit on engines `only` without waiting; see `refit.session`."""
        return [self.actors[i].refit.remote(step, *args) for i in (range(len(self.actors)) if only is None else only)]

    def stats(self) -> list[dict[str, float]]:
        """Counters of every serving engine since it started."""
        return self.wait([actor.stats.remote() for actor in self._serving()])

    def wait(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return gather(refs, [f"engine {i}" for i in self.serving], self.recipe.run.wait_s)

    def _serving(self) -> list[ray.actor.ActorHandle]:
        return [self.actors[i] for i in self.serving]
