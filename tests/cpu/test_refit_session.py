"""A refit as the driver sees it, between processes: who fails is left behind, who does not commits, and nothing hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray

from tests.support.reference import fingerprint, reference
from tests.support.refit_actors import EngineActor, Party, TrainerActor
from tests.support.refits import open_store
from trt_rl.arch import Arch
from trt_rl.errors import RefitError, WorkerDied
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.member import Agreement
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.route import Placement
from trt_rl.refit.session import Outcome, RefitSession
from trt_rl.refit.transports.link import Meeting

FORMAT, LAYOUT = "fp8_block", Layout(pp=2)
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def cluster(models):
    """Two trainer ranks and two engines, in processes that tests share; a dead one is replaced."""
    find_tests = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error", runtime_env=find_tests)
    folder = str(models("dense"))

    def trainer(rank: int):
        return ray.remote(num_cpus=1)(TrainerActor).remote(folder, LAYOUT, rank, FORMAT)

    def engine():
        return ray.remote(num_cpus=1)(EngineActor).remote(folder, FORMAT)

    made = {"trainers": [trainer(0), trainer(1)], "engines": [engine(), engine()]}
    ray.get([actor.order.remote("nothing", "") for actor in made["trainers"] + made["engines"]])  # all are up
    made |= {"new_trainer": trainer, "new_engine": engine, "folder": folder, "store": open_store(), "generation": 0}
    yield made
    ray.shutdown()


class World:
    def __init__(self, cluster: dict, delta: bool = False, one_node: bool = False, verify: str = "full") -> None:
        self.cluster = cluster
        self.trainers, self.engines = Party(cluster["trainers"]), Party(cluster["engines"])
        # Sessions of one test run share a store; each begins with generations of its own.
        cluster["generation"] += 100
        meeting = Meeting("127.0.0.1", cluster["store"].port, 4, 2, TIMEOUT_S)
        place = Placement((0, 0), (1, 1) if one_node else (1, 2))
        agreement = Agreement(LAYOUT, EngineLayout(replicas=2), 10_000, "gloo", meeting, place, delta)
        self.session = RefitSession(agreement, self.trainers, self.engines, {"trainer": "x", "engine": "x"}, verify)
        self.session.generation = cluster["generation"]

    def run(self, version: int) -> Outcome:
        start = time.monotonic()
        try:
            return self.session.run(version)
        finally:
            assert time.monotonic() - start < TIMEOUT_S, "somebody waited for a timeout"

    def order(self, actor, step: str, fault: str) -> None:
        ray.get(actor.order.remote(step, fault))

    def state(self, engine: int):
        return ray.get(self.engines.actors[engine].state.remote())

    def scale(self, factor: float) -> None:
        ray.get([t.scale.remote(factor) for t in self.trainers.actors])

    def assert_serves(self, engine: int, version: int, scale: float = 1.0) -> None:
        table = PrecisionTable.build(Arch.load(self.cluster["folder"]), PrecisionPolicy(FORMAT))
        found, poisoned, held = self.state(engine)
        assert (found, poisoned) == (version, None)
        assert held == {name: fingerprint(t) for name, t in reference(self.cluster["folder"], table, scale).items()}


@pytest.fixture
def world(cluster):
    made = []

    def new(**options) -> World:
        made.append(World(cluster, **options))
        return made[-1]

    yield new
    for one in made:
        if one.session.connected:
            one.session._disconnect(one.session.connected)


def test_versions_follow_each_other_over_one_connection(world):
    w = world(delta=True)
    first = w.run(0)
    assert first.serving == [0, 1] and not first.failed and first.saved_bytes == 0 and first.verified > 100
    w.scale(2.0)
    second = w.run(1)
    assert second.serving == [0, 1] and second.saved_bytes > 0
    for engine in (0, 1):
        w.assert_serves(engine, 1, 2.0)
    w.scale(0.5)
    assert w.run(2).serving == [0, 1]
    assert [s for s, _ in w.engines.steps].count("join") == 1
    assert {"trainer/wire", "trainer/quantize", "engine/wire", "engine/load"} <= second.seconds.keys()


def test_an_engine_without_memory_stays_out_and_is_invited_again_to_a_full_refit(world):
    w = world(delta=True, verify="sample")
    first = w.run(0)
    w.order(w.engines.actors[1], "prepare", "memory")
    outcome = w.run(1)
    assert outcome.serving == [0] and list(outcome.failed) == [1]
    assert outcome.verified == first.verified / 2, "a new group's first refit is verified whole"
    assert outcome.failed[1].startswith("engine 1: not enough memory for two buckets")
    w.assert_serves(0, 1)
    w.assert_serves(1, 0)  # it was refused before anything moved, so it may go on with what it has
    assert ("receive", [0]) in w.engines.steps and ("commit", [0]) in w.engines.steps
    again = w.run(2)
    assert again.serving == [0, 1] and again.saved_bytes == 0
    for engine in (0, 1):
        w.assert_serves(engine, 2)
    last = w.run(3)
    assert last.saved_bytes > 0 and last.verified < again.verified == first.verified


def test_an_engine_that_holds_something_else_is_poisoned_and_the_other_commits(world):
    w = world()
    w.order(w.engines.actors[0], "receive", "flip")
    outcome = w.run(5)
    assert outcome.serving == [1] and list(outcome.failed) == [0]
    assert "the live tensor of engine 0 does not hold what trainer rank" in outcome.failed[0]
    assert w.state(0)[1].startswith("a refit failed: ")
    w.assert_serves(1, 5)
    assert w.run(6).serving == [0, 1]
    for engine in (0, 1):
        w.assert_serves(engine, 6)


def test_when_no_engine_takes_a_version_the_refit_fails_and_all_are_poisoned(world):
    w = world()
    for engine in w.engines.actors:
        w.order(engine, "receive", "flip")
    with pytest.raises(RefitError, match=r"no engine could take version 7: engine 0: .*; engine 1: "):
        w.run(7)
    assert all(w.state(i)[1].startswith("a refit failed") for i in (0, 1))
    for engine in w.engines.actors:
        w.order(engine, "prepare", "memory")
    with pytest.raises(RefitError, match="no engine could take version 8: engine 0: not enough memory"):
        w.run(8)
    assert w.run(9).serving == [0, 1]


def test_refused_weights_leave_every_engine_as_it_was(world):
    w, name = world(delta=True), "decoder.layers.1.mlp.linear_fc2.weight"
    w.run(10)
    before = ray.get(w.trainers.actors[1].put.remote(name, float("nan")))
    with pytest.raises(
        RefitError, match=r"trainer rank 1: model\.layers\.3\.mlp\.down_proj\.weight: the trainer's weight holds NaN or Inf"
    ):
        w.run(11)
    for engine in (0, 1):
        w.assert_serves(engine, 10)
    ray.get(w.trainers.actors[1].put.remote(name, before))
    outcome = w.run(12)
    assert outcome.serving == [0, 1] and outcome.saved_bytes > 0, "nobody had to meet again"
    for engine in (0, 1):
        w.assert_serves(engine, 12)


def test_a_trainer_rank_that_fails_while_sending_poisons_and_the_next_refit_heals(world):
    w = world(one_node=True)
    w.order(w.trainers.actors[1], "send", "fail midway")
    with pytest.raises(RefitError, match="trainer rank 1: boom was told to fail"):
        w.run(20)
    assert all("stopped sending" in w.state(engine)[1] for engine in (0, 1))
    assert w.run(21).serving == [0, 1]
    w.assert_serves(0, 21)


@pytest.mark.parametrize("party", ["trainers", "engines"])
def test_parties_that_computed_other_routes_do_not_begin(world, party):
    w = world()
    w.order(getattr(w, party).actors[1], "agree", "digest")
    with pytest.raises(RefitError, match=r"the parties computed different routes: engine 0 \w+-\w+, engine 1 .*trainer rank 1"):
        w.run(30)
    assert "join" not in {step for step, _ in w.engines.steps}
    assert w.run(31).serving == [0, 1]


def test_an_engine_that_cannot_agree_is_left_out(world):
    w = world()
    w.order(w.engines.actors[0], "agree", "break")
    outcome = w.run(32)
    assert outcome.serving == [1] and outcome.failed[0].startswith("engine 0 failed: KeyError")


@pytest.mark.parametrize("one_node", [False, True], ids=["two nodes", "behind each other in chains"])
def test_an_engine_process_that_ends_while_it_receives_costs_nobody_else(world, cluster, one_node):
    w, first = world(one_node=one_node), 60 if one_node else 40
    w.run(first)
    w.order(w.engines.actors[1], "receive", "die midway")
    outcome = w.run(first + 1)
    assert outcome.serving == [0] and outcome.failed[1].startswith("engine 1 died")
    w.assert_serves(0, first + 1)
    outcome = w.run(first + 2)
    assert outcome.serving == [0] and not outcome.failed, "a dead engine was asked again"
    w.assert_serves(0, first + 2)
    cluster["engines"][1] = cluster["new_engine"]()
    ray.get(cluster["engines"][1].state.remote())


def test_a_trainer_process_that_ends_while_it_sends_ends_the_refit_by_its_name(world, cluster):
    w = world()
    w.run(70)
    w.order(w.trainers.actors[1], "send", "die midway")
    with pytest.raises(WorkerDied, match="trainer rank 1 died"):
        w.run(71)
    for engine in (0, 1):
        version, poisoned, _ = w.state(engine)
        assert version == 70 and "stopped sending" in poisoned
    cluster["trainers"][1] = cluster["new_trainer"](1)
    ray.get(cluster["trainers"][1].order.remote("nothing", ""))
    assert world().run(72).serving == [0, 1]
