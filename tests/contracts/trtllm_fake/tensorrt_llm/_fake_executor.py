"""Fake only: `RayExecutor`, the owner's side of the workers, at its release's module path."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
import uuid
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tensorrt_llm import _family
from tensorrt_llm._fake_control import unwrap_ray_errors
from tensorrt_llm._fake_worker import RayGPUWorker, RayWorkerWrapper
from tensorrt_llm.executor.result import GenerationResult
from tensorrt_llm.logger import logger

HERE = str(Path(__file__).resolve().parent.parent)
_NODE_LOCAL = ("RAY_RAYLET_PID", "RAY_NODE_IP_ADDRESS")


class RayExecutor:
    def __init__(self, llm_args: Any, hf_model_dir: str) -> None:
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        os.environ["RAY_DEDUP_LOGS"] = "0"
        self.has_started_local_cluster = False
        settings = {
            "include_dashboard": False,
            "namespace": "trtllm",
            "ignore_reinit_error": True,
            "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
        }
        if not ray.is_initialized():
            try:
                if os.environ.get("TLLM_RAY_FORCE_LOCAL_CLUSTER", "0") == "1":
                    raise ConnectionError
                ray.init(address="auto", **settings)
            except ConnectionError:
                ray.init(address="local", **settings)
                self.has_started_local_cluster = True
        self.llm_args, self.world_size = llm_args, llm_args.world_size
        self.master_address = ray.util.get_node_ip_address()
        self.rpc_addr = f"{tempfile.gettempdir()}/trtllm_fake_{uuid.uuid4().hex[:12]}"
        self.hmac_key = os.urandom(32)
        self.worker_kwargs = {
            "ray_worker_extension_cls": llm_args.ray_worker_extension_cls,
            "llm_args": llm_args,
            "hf_model_dir": hf_model_dir,
            "rpc_addr": self.rpc_addr,
            "hmac_key": self.hmac_key,
        }
        self._results: dict[int, GenerationResult] = {}
        self._next_id, self._lock, self._stopping, self._dead = 0, threading.Lock(), False, None
        self.workers: list | None = []
        self._connection = None
        self.placement_group = None
        placement = llm_args.ray_placement_config
        if not (placement and placement.defer_workers_init):
            self.init_workers_sync()
            self.collective_rpc("setup_engine")
            self._connect()

    # --- workers -------------------------------------------------------------------------------------------------

    def create_workers(self) -> None:
        placement = self.llm_args.ray_placement_config
        share = float(os.getenv("TRTLLM_RAY_PER_WORKER_GPUS", "1.0"))
        if placement and placement.per_worker_gpu_share is not None:
            share = placement.per_worker_gpu_share
        dropped = () if _family.COPIES_NODE_LOCAL_VARS else _NODE_LOCAL
        env = {k: v for k, v in os.environ.items() if k not in dropped}
        # The real package is installed on every node; this one has to be found.
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([HERE, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]))
        env |= {"TLLM_DISABLE_MPI": "1", "MASTER_ADDR": self.master_address}
        env |= {"TRTLLM_FAKE_VERSION": _family.VERSION, "TRTLLM_FAKE_OWNER_NODE": ray.get_runtime_context().get_node_id()}
        for rank, (group, bundle) in enumerate(self._bundles()):
            has_gpu = group.bundle_specs[bundle].get("GPU", 0) > 0  # CPU bundles stand for GPUs where none are declared
            worker = RayWorkerWrapper.options(
                **({"num_gpus": share} if has_gpu else {}),
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote(RayGPUWorker, self.worker_kwargs, self.world_size, rank)
            self.workers.append(worker)

    def _bundles(self) -> list[tuple[Any, int]]:
        placement = self.llm_args.ray_placement_config
        if placement and placement.placement_groups is not None:
            total = sum(map(len, placement.placement_bundle_indices))
            if total != self.world_size:
                raise ValueError(f"Total bundle indices ({total}) must equal world_size ({self.world_size})")
            pairs = zip(placement.placement_groups, placement.placement_bundle_indices, strict=True)
            return [(group, index) for group, indices in pairs for index in indices]
        if given := os.getenv("TRTLLM_RAY_BUNDLE_INDICES"):
            group, indices = get_current_placement_group(), [int(i) for i in given.split(",")]
            assert len(indices) == self.world_size, f"Need {self.world_size} bundle indices, got {indices=}"
            assert len(set(indices)) == len(indices), f"TRTLLM_RAY_BUNDLE_INDICES cannot have duplicate values, but got {indices=}."
            return [(group, i) for i in indices]
        gpu = ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"GPU": 1, "CPU": 1} if gpu else {"CPU": 1}
        self.placement_group = placement_group([dict(bundle) for _ in range(self.world_size)], strategy="PACK")
        ray.get(self.placement_group.ready(), timeout=60)
        return [(self.placement_group, i) for i in range(self.world_size)]

    def _ready(self) -> list:
        return [worker.__ray_ready__.remote() for worker in self.workers]

    def init_workers_sync(self) -> None:
        self.create_workers()
        try:
            ray.get(self._ready())
        except ray.exceptions.ActorDiedError as error:
            raise RuntimeError("RayGPUWorker died during initialization") from error
        port = ray.get(self.workers[0].setup_tcp_store.remote())
        ray.get([w.setup_distributed_env_and_worker.remote(port=port) for w in self.workers])

    async def init_workers_async(self) -> None:
        self.create_workers()
        try:
            await asyncio.gather(*self._ready())
        except ray.exceptions.ActorDiedError as error:
            raise RuntimeError("RayGPUWorker died during initialization") from error
        port = await self.workers[0].setup_tcp_store.remote()
        await asyncio.gather(*[w.setup_distributed_env_and_worker.remote(port=port) for w in self.workers])

    async def setup_engine_remote_async(self) -> list:
        if not self.workers:
            raise RuntimeError("Workers must be initialized before calling setup_engine_remote_async")
        result = await self.collective_rpc_async("setup_engine")
        self._connect()
        return result

    def _calls(self, method: str, args: tuple, kwargs: dict | None, ranks: Any) -> list:
        ranks = range(len(self.workers)) if ranks is None else ranks if isinstance(ranks, list) else [ranks]
        refs = []
        for worker in [self.workers[r] for r in ranks]:
            own = getattr(worker, method, None)
            call = own.remote if own is not None else lambda *a, w=worker, **k: w.call_worker_method.remote(method, *a, **k)
            refs.append(call(*args, **(kwargs or {})))
        return refs

    @unwrap_ray_errors()
    def collective_rpc(self, method, args=(), kwargs=None, non_block=False, unique_reply_rank=None, target_ranks=None) -> list:
        refs = self._calls(method, args, kwargs, unique_reply_rank if target_ranks is None else target_ranks)
        return refs if non_block else ray.get(refs)

    async def collective_rpc_async(self, method, args=(), kwargs=None, unique_reply_rank=None, target_ranks=None) -> list:
        # Awaited references raise Ray's own dual error, not the cause: the decorator of the real one does not reach here.
        return await asyncio.gather(*self.collective_rpc(method, args, kwargs, True, unique_reply_rank, target_ranks))

    def report_device_ids(self) -> list[str]:
        return sorted(self.collective_rpc("report_device_id"))

    # --- requests ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._connection = Client(self.rpc_addr, family="AF_UNIX", authkey=self.hmac_key)
        self._reader = threading.Thread(target=self._read, name="ray_executor_main_loop", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="trtllm_fake_watch", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                for response in self._connection.recv():
                    with self._lock:
                        result = self._results.get(response["client_id"])
                        if response["finish"] is not None or response["error"] is not None:
                            self._results.pop(response["client_id"], None)
                    if result is not None:
                        result.put(response)
        except (EOFError, OSError):
            self._fail("RayGPUWorker of rank 0 died")

    def _watch(self) -> None:
        """What ends requests when a worker dies. The package has nothing of the kind that could be found: there, requests
        may wait for ever (TRTLLM_FAKE_HANG_ON_DEATH=1)."""
        while not self._stopping and self._dead is None:
            time.sleep(0.5)
            for rank, worker in enumerate(self.workers or ()):
                if _is_dead(worker):
                    self._fail(f"RayGPUWorker of rank {rank} died")
                    break

    def _fail(self, why: str) -> None:
        if _family.knob("HANG_ON_DEATH") or self._stopping:
            return
        with self._lock:
            waiting, self._results, self._dead = list(self._results.values()), {}, why
        for result in waiting:
            result.put(RuntimeError(f"{why}; the request cannot be finished"))

    def generate_async(self, prompt: list[int], params: Any, streaming: bool, result_class: type[GenerationResult]) -> GenerationResult:
        if self._dead is not None:
            raise RuntimeError(self._dead)
        if self._connection is None:
            raise RuntimeError("the workers are not set up: await setup_async() first")
        with self._lock:
            self._next_id += 1
            result = result_class(self._next_id, prompt, params, streaming, self)
            self._results[result.id] = result
            self._connection.send({"client_id": result.id, "prompt": prompt, "params": params, "streaming": streaming})
        return result

    def abort_request(self, request_id: int) -> None:
        ray.get(self.workers[0].abort_request.remote(request_id=request_id))

    if _family.PAUSE:

        def abort_all_requests(self) -> None:
            for result in list(self._results.values()):
                result.abort()

    def shutdown(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self.workers:
            try:
                ray.get([w.shutdown.remote() for w in self.workers], timeout=30)
            except ray.exceptions.RayError as error:
                logger.warning(f"Error shutting down: {error}")
        with self._lock:
            waiting, self._results = list(self._results.values()), {}
        for result in waiting:
            result.put(RuntimeError("the executor was shut down"))
        if self._connection is not None:
            self._connection.close()
        self.workers = None  # the actors' last handles
        if self.placement_group is not None and ray.is_initialized():
            ray.util.remove_placement_group(self.placement_group)
        self.placement_group = None
        if self.has_started_local_cluster and ray.is_initialized():
            ray.shutdown()


def _is_dead(worker: Any) -> bool:
    from ray._private.state import actors

    state = actors(worker._actor_id.hex())
    return state.get("State") == "DEAD"
