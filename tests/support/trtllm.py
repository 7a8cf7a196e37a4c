"""TensorRT-LLM's adapter in a process of its own, as in a run: over the contract fake here, over the package where it is installed."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.support.refits import ONE_RANK, megatron_parameters, open_store, raised, together
from trt_rl.arch import Arch
from trt_rl.errors import EngineError
from trt_rl.layout import EngineLayout
from trt_rl.placement import Bundles
from trt_rl.refit.member import Agreement, TrainerMember
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
from trt_rl.refit.stream import Refit
from trt_rl.refit.transports.link import Meeting
from trt_rl.rollout.engine import Home, Request, make_engine

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/contracts/trtllm_fake"
REAL = importlib.util.find_spec("tensorrt_llm") is not None
FAMILIES = ("1.2.1", "1.3.0rc15", "1.3.0rc29", "1.4.0rc1")


def environment(version: str, **knobs: str) -> dict[str, str]:
    """Variables under which `tensorrt_llm` is the fake of a release, in a Ray actor and in those that it starts."""
    if REAL:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(FAKE), str(ROOT)]), "TRTLLM_FAKE_VERSION": version, **knobs}


@functools.cache
def _extension() -> type:
    from trt_rl.rollout.trtllm_worker import RefitExtension

    class Probed(RefitExtension):
        """The adapter's own, and a door for tests into every worker."""

        def trt_rl_test(self, function: Any, *args: Any) -> Any:
            return function(self, *args)

    return Probed


def __getattr__(name: str) -> Any:
    if name == "Probed":  # made where the workers look for it: its base needs tensorrt_llm
        return _extension()
    raise AttributeError(name)


def pid(worker: Any) -> int:
    return os.getpid()


def set_knobs(worker: Any, knobs: dict[str, str | None]) -> None:
    """Of the contract fake, which looks at them when it needs them; None takes one away."""
    for name, value in knobs.items():
        if value is None:
            os.environ.pop(f"TRTLLM_FAKE_{name}", None)
        else:
            os.environ[f"TRTLLM_FAKE_{name}"] = value


def update_environment(engine: Any, values: dict[str, str]) -> None:
    os.environ.update(values)


def launcher_variables(worker: Any) -> list[str]:
    return [name for name in os.environ if name.startswith(("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_"))]


def configured(worker: Any) -> tuple[float, list[int] | None]:
    config = worker.engine.model_engine.model.config
    return config.initializer_range, (getattr(config, "quantization_config", None) or {}).get("weight_block_size")


def iterations(worker: Any) -> tuple[int, bool]:
    return worker.engine.iteration, worker.engine.is_idle()


def norm_is_gone(worker: Any) -> bool:
    return bool(worker.engine.model_engine.model.model.norm.weight.isnan().any())


def fail_here(worker: Any) -> None:
    os.environ["TRTLLM_FAKE_FAIL_RELOAD_RANK"] = str(worker.rank)


def drop_resets(worker: Any, drop: bool) -> None:
    if drop:
        worker.engine.reset_prefix_cache = lambda: None
    else:
        del worker.engine.reset_prefix_cache
        worker.engine.reset_prefix_cache()


def raise_here(worker: Any) -> None:
    if worker.rank == worker.llm_args.tensor_parallel_size - 1:
        raise KeyError("only of the last rank")


def node_of(_: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def why_not_started(engine: Any, options: dict[str, Any], format: str = "bf16", nodes: int = 1) -> str:
    """What another adapter in the owner's process says when it is started."""
    from trt_rl.rollout.trtllm import TrtllmEngine

    table = PrecisionTable.build(engine.arch, PrecisionPolicy(format))
    other = TrtllmEngine(engine.model_path, engine.arch, table, engine.layout, **options)
    other.home = engine.home
    if nodes > 1:
        other._nodes = lambda: set(range(nodes))
    try:
        other.start()
    except EngineError as error:
        other.stop()  # harmless: nothing started
        return str(error)
    return "it started"


class Host:
    """The Ray actor that owns the engine."""

    def __init__(self, folder: str, policy: PrecisionPolicy, layout: EngineLayout, home: Home, options: dict[str, Any]) -> None:
        from trt_rl.rollout import trtllm

        trtllm._EXTENSION = "tests.support.trtllm.Probed"
        arch = Arch.load(folder)
        self.engine = make_engine("trtllm", folder, arch, PrecisionTable.build(arch, policy), layout, options)
        self.engine.home = home

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self.engine, method), *args)

    async def generate(self, requests: list[Request]) -> Any:
        return await self.engine.generate_many(requests)

    async def within(self, function: Any, *args: Any) -> Any:
        """`function(engine, ...)` in the process of the engine's owner."""
        return await asyncio.to_thread(function, self.engine, *args)

    async def in_workers(self, function: Any, *args: Any) -> list[Any]:
        """`function(worker, ...)` in every worker, in order of ranks."""
        return await asyncio.to_thread(self.engine._rpc, "trt_rl_test", function, *args)


class RemoteEngine:
    """The engine interface over a `Host`."""

    def __init__(self, folder: Path | str, format: str = "bf16", tp: int = 1, ep: int = 1, version: str = "1.3.0rc15", sleep: bool = False,
                 knobs: dict[str, str] | None = None, policy: PrecisionPolicy | None = None, **options: Any) -> None:  # fmt: skip
        if not ray.is_initialized():
            ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="error", configure_logging=False)
        policy = policy or PrecisionPolicy(format)
        self.arch = Arch.load(folder)
        self.table = PrecisionTable.build(self.arch, policy)
        self.layout, self.release = EngineLayout(tp, ep, 1, whole=True), "" if REAL else version
        gpu = {"GPU": 1} if ray.cluster_resources().get("GPU", 0) else {}
        own = Bundles.reserve([{"CPU": 1, **gpu}] * tp, 60, "the engine")
        self.group, self.nodes, home = own.group, own.nodes, Home(own.group, own.order)
        options = {"sleep": sleep} | options
        actor = ray.remote(Host).options(
            num_cpus=0,
            runtime_env={"env_vars": environment(version, **(knobs or {}))},
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.nodes[0], soft=False),
        )
        self.host = actor.remote(str(folder), policy, self.layout, home, options)

    @staticmethod
    def _get(ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=300)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._get(self.host.call.remote(name, *args))

    def within(self, function: Any, *args: Any) -> Any:
        return self._get(self.host.within.remote(function, *args))

    def in_workers(self, function: Any, *args: Any) -> list[Any]:
        return self._get(self.host.in_workers.remote(function, *args))

    async def generate_many(self, requests: list[Request]) -> Any:
        try:
            return await self.host.generate.remote(requests)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self.release_places()

    def release_places(self) -> None:
        """What is left to do where the engine did not start."""
        ray.kill(self.host)
        remove_placement_group(self.group)


def refit(
    engine, folder, scale=1.0, verify="full", bucket_bytes=100_000, spoil: Callable | None = None, placement=None
) -> list[dict[str, Any]]:
    """A whole refit to the next version; the reports of every rank. An error of the engine comes before its echo in the trainer.

    Args:
        spoil: is given each bucket after it was filled.
    """
    store, version = open_store(), (engine.health()["version"] or 0) + 1
    agreement = Agreement(
        ONE_RANK, engine.layout, bucket_bytes, "gloo", Meeting("127.0.0.1", store.port, 1 + engine.layout.tp, 1, 60.0), placement
    )
    weights = list(megatron_parameters(folder, ONE_RANK, 0, scale).items())
    trainer = TrainerMember(agreement, engine.arch, engine.table, 0, weights)
    try:
        assert engine.agree_refit(agreement, 0) == [trainer.digest] * engine.layout.tp
        raised(together(engine.join_refit, trainer.join))
        trainer.check()
        trainer.prepare()
        if spoil:
            fill = trainer.source.fill
            trainer.source.fill = lambda slot, digests: (fill(slot, digests), spoil(slot))
        engine.prepare_refit(version)
        move = Refit(version, verify)
        reports, _ = raised(together(lambda: engine.receive_refit(move), lambda: trainer.send(move)))
        engine.commit_refit(version)
        return reports
    finally:
        engine.disconnect_refit()
        trainer.close()


class Background:
    """A request that runs while the test goes on."""

    def __init__(self, engine, one: Request) -> None:
        self.outcome: Any = None
        self.thread = threading.Thread(target=self._run, args=(engine, one), daemon=True)
        self.thread.start()

    def _run(self, engine, one: Request) -> None:
        try:
            (self.outcome,) = asyncio.run(engine.generate_many([one]))
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.outcome = error

    def finish(self, within_s: float = 60) -> Any:
        self.thread.join(within_s)
        assert not self.thread.is_alive(), f"the request still waits after {within_s} s"
        return self.outcome
