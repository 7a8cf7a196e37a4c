"""What the driver's pool does with requests, on small actors that stand for engines: they answer when told and end when told."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from trt_rl.errors import EngineError, EngineLost, WorkerDied, WorkerFailed, WorkerSilent
from trt_rl.rollout.pool import RolloutPool

ENGINES = 3


class StandIn:
    """Answers every request with its own number, unless it has been told to hold its answers back or to fail."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.behave()

    def behave(self, fails: str = "", at_call: int = 1, holds: bool = False) -> None:
        self.fails, self.at_call, self.calls, self.open = fails, at_call, [], asyncio.Event()
        if not holds:
            self.open.set()

    async def generate(self, requests: list) -> list:
        self.calls.append([request.id for request in requests])
        if self.fails and len(self.calls) >= self.at_call:
            await asyncio.sleep(0.1)
            if self.fails == "exit":
                os._exit(1)
            from trt_rl import errors

            raise getattr(errors, self.fails, ValueError)(
                "worker of rank 1 ended" if self.fails == "EngineLost" else f"told to: {self.fails}"
            )
        await self.open.wait()
        return [(request.id, self.number) for request in requests]

    async def control(self, method: str, *args) -> str:
        if self.fails == "exit":
            os._exit(1)
        if self.fails:
            from trt_rl import errors

            raise getattr(errors, self.fails)("told to")
        await self.open.wait()
        return method

    async def stats(self) -> dict[str, float]:
        return {"requests": len(self.calls)}

    async def answer(self) -> None:
        self.open.set()

    async def seen(self) -> list[list[str]]:
        return self.calls


@pytest.fixture(scope="module")
def actors():
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # what the pool no longer waits for may fail unheard
    mine = not ray.is_initialized()
    if mine:
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error", configure_logging=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors need not import torch
    kind = ray.remote(StandIn).options(num_cpus=0, max_concurrency=100)
    made = [kind.remote(i) for i in range(ENGINES)]
    made.append(kind)
    yield made
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    for actor in made[:ENGINES]:
        ray.kill(actor)
    if mine:
        ray.shutdown()


@pytest.fixture
def pool(actors):
    ray.get([actor.behave.remote() for actor in actors[:ENGINES]])
    return pool_of(actors[:ENGINES])


@pytest.fixture
def mortal(actors):
    """A pool of its own: what is lost is ended, too."""
    pool = pool_of([actors[ENGINES].remote(i) for i in range(ENGINES)])
    yield pool
    for actor in pool.actors:
        ray.kill(actor)


def pool_of(actors, wait_s: float = 20.0) -> RolloutPool:
    return RolloutPool(SimpleNamespace(run=SimpleNamespace(wait_s=wait_s)), list(actors), None)


def behave(pool: RolloutPool, engine: int, **how) -> None:
    ray.get(pool.actors[engine].behave.remote(**how))


def calls(pool: RolloutPool, engine: int) -> list[list[str]]:
    return ray.get(pool.actors[engine].seen.remote())


def group(prompt: int, count: int = 2, max_tokens: int = 10, length: int = 4) -> list[SimpleNamespace]:
    """Requests with one prompt; the pool looks at nothing else of them."""
    sampling = SimpleNamespace(max_tokens=max_tokens)
    return [SimpleNamespace(id=f"{prompt}-{i}", prompt=(prompt,) * length, sampling=sampling) for i in range(count)]


def given_in_one_call(pool: RolloutPool, id: str) -> list[str]:
    return next(call for engine in pool.serving for call in calls(pool, engine) if id in call)


def test_every_request_is_answered_in_its_place(pool):
    asked = [request for i in range(20) for request in group(i)]
    mixed = asked[::2] + asked[1::2]  # the samples of a prompt are far apart
    answers = pool.generate(mixed)
    assert [id for id, _ in answers] == [request.id for request in mixed]
    assert pool.generate([]) == [] and (pool.lost, pool.reissued) == ({}, 0)


def test_a_group_stays_on_one_engine_in_one_call(pool):
    asked = [request for i in range(12) for request in group(i, count=4)]
    asked = sorted(asked, key=lambda request: request.id[-1])
    by_prompt: dict = {}
    for (_, engine), request in zip(pool.generate(asked), asked, strict=True):
        by_prompt.setdefault(request.prompt, set()).add(engine)
    assert all(len(engines) == 1 for engines in by_prompt.values()) and set.union(*by_prompt.values()) == {0, 1, 2}
    assert sorted(given_in_one_call(pool, "7-0")) == [f"7-{i}" for i in range(4)]


def counts_while_one_holds(pool: RolloutPool, slow: int, asked: list, others: int) -> list[int]:
    """Requests answered by each engine, where engine `slow` answers after the other ones were given `others` requests."""
    behave(pool, slow, holds=True)
    answers: list = []
    thread = threading.Thread(target=lambda: answers.extend(pool.generate(asked)), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while sum(len(calls(pool, i)) for i in pool.serving if i != slow) < others and time.monotonic() < deadline:
        time.sleep(0.02)
    ray.get(pool.actors[slow].answer.remote())
    thread.join(20)
    assert [id for id, _ in answers] == [request.id for request in asked]
    return [sum(engine == i for _, engine in answers) for i in range(ENGINES)]


def test_groups_go_where_fewest_tokens_are_queued(pool):
    big, small = group(0, count=1, max_tokens=996), [r for i in range(1, 31) for r in group(i, count=1, max_tokens=46)]
    counts = counts_while_one_holds(pool, 0, [*big, *small], 30)
    # 1000 tokens are on one engine; the other 1500 belong elsewhere, three quarters of a fair share at once on each.
    assert counts[0] == 1 and min(counts[1:]) >= 12, counts


def test_the_last_groups_go_to_whoever_is_done_first(pool):
    counts = counts_while_one_holds(pool, 2, [r for i in range(40) for r in group(i, count=1, max_tokens=16)], 30)
    assert counts[2] == 10 and min(counts) >= 10, counts  # a fixed share would be 13


def test_an_engine_alone_gets_everything_in_one_call(actors):
    ray.get(actors[0].behave.remote())
    pool = pool_of(actors[:1])
    asked = [request for i in range(5) for request in group(i)]
    pool.generate(asked)
    assert calls(pool, 0) == [[request.id for request in asked]]


@pytest.mark.parametrize("fails", ["EngineLost", "exit"])
def test_requests_of_an_engine_that_ends_are_asked_again_elsewhere(mortal, fails):
    pool = mortal
    behave(pool, 2, fails=fails, at_call=2)
    asked = [request for i in range(24) for request in group(i)]
    answers = pool.generate(asked)
    assert [id for id, _ in answers] == [request.id for request in asked]
    assert pool.serving == [0, 1] and list(pool.lost) == [2]
    assert ("worker of rank 1 ended" if fails == "EngineLost" else "engine 2 died") in pool.lost[2]
    answered = {id for id, _ in answers}
    again = [id for i in (0, 1) for call in calls(pool, i) for id in call]
    assert answered == set(again) | {id for id, engine in answers if engine == 2} and len(again) == len(set(again))
    assert pool.reissued >= 2 and pool.reissued % 2 == 0
    with pytest.raises(ray.exceptions.RayActorError):  # what is left of it has ended as well
        ray.get(pool.actors[2].seen.remote(), timeout=30)
    before = pool.reissued
    assert {engine for _, engine in pool.generate(asked)} == {0, 1} and pool.reissued == before


@pytest.mark.parametrize(("fails", "kind"), [("EngineError", EngineError), ("ValueError", WorkerFailed)])
def test_a_refused_request_is_an_error_and_no_death(pool, fails, kind):
    behave(pool, 1, fails=fails)
    with pytest.raises(kind, match=f"(?s)engine 1.*told to: {fails}") as failure:
        pool.generate([request for i in range(12) for request in group(i)])
    assert not isinstance(failure.value, EngineLost)
    assert (pool.serving, pool.lost, pool.reissued) == ([0, 1, 2], {}, 0)


@pytest.mark.parametrize("fails", ["EngineLost", "exit"])
def test_an_engine_that_ended_while_it_was_idle_does_not_end_the_run(mortal, fails):
    pool = mortal
    behave(pool, 2, fails=fails)
    pool.pause("drain")
    pool.resume()
    assert pool.serving == [0, 1] and list(pool.lost) == [2]
    assert pool.stats() == [{"requests": 0}] * 2
    behave(pool, 1, fails="EngineError")
    with pytest.raises(EngineError, match="engine 1: told to"):
        pool.pause("drain")


def test_an_engine_that_does_not_answer_a_control_call_ends_the_run(actors):
    ray.get([actor.behave.remote() for actor in actors[:ENGINES]])
    pool = pool_of(actors[:2], wait_s=1.0)
    behave(pool, 1, holds=True)
    with pytest.raises(WorkerSilent, match=r"no answer within 1 s from: engine 1$"):
        pool.pause("drain")
    assert pool.serving == [0, 1] and not pool.lost


def test_when_all_engines_have_ended_each_is_named(mortal):
    pool = mortal
    for engine in range(ENGINES):
        behave(pool, engine, fails="EngineLost", at_call=1 + engine)
    asked = [request for i in range(12) for request in group(i)]
    for _ in range(2):  # and whoever asks again hears the same
        with pytest.raises(EngineLost, match=r"no engine is left: ") as failure:
            pool.generate(asked)
        told = str(failure.value)
        assert all(told.count(f"engine {i}: ") == 1 for i in range(ENGINES)) and told.count("worker of rank 1 ended") == ENGINES, told
    assert pool.serving == [] and set(pool.lost) == {0, 1, 2}


def test_silence_is_named(actors):
    ray.get([actor.behave.remote() for actor in actors[:ENGINES]])
    pool = pool_of(actors[:2], wait_s=1.0)
    behave(pool, 1, holds=True)
    with pytest.raises(WorkerDied, match=r"no answer within 1 s from: engine 1$"):
        pool.generate([request for i in range(2) for request in group(i)])
