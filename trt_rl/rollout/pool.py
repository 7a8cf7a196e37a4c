"""The driver's handle on all rollout engines."""

from __future__ import annotations

from dataclasses import dataclass
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
        home: dict[tuple[int, ...], int] = {}
        for request in requests:
            home.setdefault(request.prompt, len(home) % len(self.actors))
        shares: list[list[int]] = [[] for _ in self.actors]
        for i, request in enumerate(requests):
            shares[home[request.prompt]].append(i)
        refs = [actor.generate.remote([requests[i] for i in share]) for actor, share in zip(self.actors, shares, strict=True)]
        results: list[Completion | None] = [None] * len(requests)
        for share, completions in zip(shares, self.wait(refs), strict=True):
            for i, completion in zip(share, completions, strict=True):
                results[i] = completion
        return results

    def pause(self, mode: str = "drain") -> None:
        self.wait([actor.pause.remote(mode) for actor in self.actors])

    def resume(self) -> None:
        self.wait([actor.resume.remote() for actor in self.actors])

    def begin(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Start `method` on every engine without waiting."""
        return [getattr(actor, method).remote(*args) for actor in self.actors]

    def stats(self) -> list[dict[str, float]]:
        """Counters of every engine since it started."""
        return self.wait(self.begin("stats"))

    def names(self) -> list[str]:
        return [f"engine {i}" for i in range(len(self.actors))]

    def wait(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return gather(refs, self.names(), self.recipe.run.wait_s)
