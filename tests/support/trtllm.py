"""TensorRT-LLM's adapter in a process of its own, as in a run: over the contract fake here, over the package where it is installed."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import ray
from ray.util import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout
from trt_rl.placement import Bundles
from trt_rl.refit.precision import PrecisionPolicy, PrecisionTable
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
            ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="error", configure_logging=False)
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
            return ray.get(ref, timeout=120)
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
