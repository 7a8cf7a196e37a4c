"""TensorRT-LLM's adapter in a process of its own, as in a run: over the contract fake here, over the package where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout
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


class Host:
    """The Ray actor that owns the engine."""

    def __init__(self, folder: str, policy: PrecisionPolicy, layout: EngineLayout, home: Home, options: dict[str, Any]) -> None:
        arch = Arch.load(folder)
        self.engine = make_engine("trtllm", folder, arch, PrecisionTable.build(arch, policy), layout, options)
        self.engine.home = home

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self.engine, method), *args)

    async def generate(self, requests: list[Request]) -> Any:
        return await self.engine.generate_many(requests)

    async def worker_pids(self) -> list[int]:
        return await asyncio.to_thread(self.engine._rpc, "trt_rl_test_pid")


class RemoteEngine:
    """The engine interface over a `Host`."""

    def __init__(self, folder: Path | str, format: str = "bf16", tp: int = 1, ep: int = 1, version: str = "1.3.0rc15", sleep: bool = False,
                 knobs: dict[str, str] | None = None, policy: PrecisionPolicy | None = None, **options: Any) -> None:  # fmt: skip
        if not ray.is_initialized():
            ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error", configure_logging=False)
        policy = policy or PrecisionPolicy(format)
        self.arch = Arch.load(folder)
        self.table = PrecisionTable.build(self.arch, policy)
        self.layout, self.release = EngineLayout(tp, ep, 1, whole=True), "" if REAL else version
        gpu = {"GPU": 1} if ray.cluster_resources().get("GPU", 0) else {}
        self.group = placement_group([{"CPU": 1, **gpu}] * tp, strategy="PACK")
        ray.get(self.group.ready(), timeout=60)
        where = placement_group_table(self.group)["bundles_to_node_id"]
        order = sorted(where, key=lambda i: (list(where.values()).index(where[i]), i))
        self.nodes = [where[i] for i in order]
        home = Home(self.group, tuple(order))
        options = {"sleep": sleep} | options
        actor = ray.remote(Host).options(
            num_cpus=0,
            runtime_env={"env_vars": environment(version, **(knobs or {}))},
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.nodes[0], soft=False),
        )
        self.host = actor.remote(str(folder), policy, self.layout, home, options)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(self.host.call.remote(method, *args), timeout=120)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._call(name, *args)

    async def generate_many(self, requests: list[Request]) -> Any:
        try:
            return await self.host.generate.remote(requests)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def close(self) -> None:
        self._call("stop")
        ray.kill(self.host)
        remove_placement_group(self.group)
