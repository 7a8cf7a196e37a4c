"""Fake only: `RayWorkerWrapper` (the Ray actor of one rank) and `RayGPUWorker` (what it drives), at their release's module path.

The actor is synchronous: one Ray call at a time. Requests and results go past it, over a socket that rank 0 opens.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
from multiprocessing.connection import Listener
from typing import Any

import ray
import torch
import torch.distributed as dist

from tensorrt_llm import _family
from tensorrt_llm._fake_control import control_action_decorator
from tensorrt_llm._torch.distributed import Mapping
from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader
from tensorrt_llm._torch.pyexecutor.py_executor import LlmRequest, ModelEngine, PyExecutor
from tensorrt_llm._torch.pyexecutor.resource_manager import KVCacheManager
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm._torch.virtual_memory import manager, materialize_with_tag, release_with_tag, verify_sleep_wakeup_tags
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType
from tensorrt_llm.logger import logger

_LAUNCHERS = re.compile(r"^(PMI|PMIX|MPI|OMPI|SLURM)_")


def _resolve(qualname: str) -> Any:
    module, name = qualname.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


class RayGPUWorker:
    """Extensions are mixed in behind this class, so that their `self` is it."""

    def __init__(self, device_id: int, llm_args: Any, hf_model_dir: str, rpc_addr: str | None = None, hmac_key: bytes = b"") -> None:
        self.device_id, self.llm_args, self.engine = device_id, llm_args, None
        self._hf_model_dir, self.doing_shutdown = hf_model_dir, False
        self.rank = self.global_rank = dist.get_rank()
        self._out = threading.Condition()
        self._responses: list[dict] = []
        if rpc_addr is None:
            raise RuntimeError("RPC mode enabled but no rpc_addr provided to RayGPUWorker")
        self.init_rpc_worker(self.rank, rpc_addr, hmac_key)
        self.start_rpc_server()

    # --- requests and results ------------------------------------------------------------------------------------

    def init_rpc_worker(self, rank: int, rpc_addr: str, hmac_key: bytes) -> None:
        self._rpc = (rpc_addr, hmac_key)

    def start_rpc_server(self) -> None:
        if self.rank == 0:
            self._listener = Listener(self._rpc[0], family="AF_UNIX", authkey=self._rpc[1])
            threading.Thread(target=self._serve, name="rpc_server", daemon=True).start()

    def _serve(self) -> None:
        connection = self._listener.accept()
        threading.Thread(target=self._answer, args=(connection,), name="rpc_answers", daemon=True).start()
        try:
            while True:
                self.submit(connection.recv())
        except (EOFError, OSError):  # the owner is gone
            return

    def _answer(self, connection: Any) -> None:
        while True:
            with self._out:
                self._out.wait_for(lambda: self._responses)
                batch, self._responses = self._responses, []
            try:
                connection.send(batch)
            except OSError:
                return

    def _respond(self, batch: list[dict]) -> None:
        with self._out:
            self._responses += batch
            self._out.notify_all()

    def submit(self, request: dict) -> None:
        try:
            self._enqueue_request(request)
        except (RequestError, ValueError, RuntimeError) as error:
            failed = {"client_id": request["client_id"], "tokens": [], "logprobs": [], "finish": None, "cached_tokens": 0}
            self._respond([failed | {"error": str(error)}])

    def enqueue_request(self, request: dict, result_wait_queue: Any = None) -> int:
        return self._enqueue_request(request)

    def _enqueue_request(self, request: dict) -> int:
        if self.engine is None:
            raise RequestError("the engine is not set up")
        prompt, params, limit = request["prompt"], request["params"], self.max_seq_len
        if len(prompt) > self.llm_args.max_input_len:
            raise RequestError(
                f"Prompt length ({len(prompt)}) exceeds maximum input length ({self.llm_args.max_input_len}). Set log level to info "
                "and check TRTLLM logs for how maximum input length is set"
            )
        vocab = self.engine.model_engine.model.config.vocab_size
        if any(not 0 <= t < vocab for t in prompt):
            raise RequestError(f"Token ID out of range: the vocabulary has {vocab} entries")
        if limit - len(prompt) <= 0:
            raise RequestError(f"`default_max_tokens` ({limit - len(prompt)}) should be greater than 0, max_seq_len is {limit}")
        params._get_stop_words()
        most = limit - len(prompt)
        if params.max_tokens is not None and params.max_tokens > most:
            logger.warning(f"User-specified `max_tokens` ({params.max_tokens}) is greater than deduced ({most}), using the latter.")
        new = LlmRequest(request["client_id"], list(prompt), params, min(params.max_tokens or most, most), request["streaming"])
        return self.engine.enqueue_request(new)

    def abort_request(self, request_id: int) -> None:
        if self.engine.can_enqueue_requests():
            self.engine.cancel_request(request_id)

    # --- the engine ----------------------------------------------------------------------------------------------

    def setup_engine(self) -> None:
        torch.set_num_threads(1)
        args, world = self.llm_args, dist.get_world_size()
        group = dist.new_group(backend="gloo") if world > 1 else None
        if world > 1:
            dist.barrier()
        self.mapping = Mapping(
            world, self.rank, args.tensor_parallel_size, args.moe_expert_parallel_size, args.moe_tensor_parallel_size, group=group
        )
        loader = ModelLoader(args, self.mapping)
        model = loader.load(self._hf_model_dir)
        hf, attention = model.config, model.model.layers[0].self_attn
        self.max_seq_len = min(args.max_seq_len or hf.max_position_embeddings, hf.max_position_embeddings)
        tokens = args.kv_cache_config.max_tokens or 1 << 16
        cache = KVCacheManager(len(model.model.layers), attention.kv_heads, attention.head_dim, hf.dtype, args.kv_cache_config, tokens)
        if (modes := args._sleep_modes) is not None:
            weights = "model_weights" if "model_weights" in modes else "model"
            manager.add(weights, lambda: [p.data for p in model.parameters()], modes[weights])
            manager.add("kv_cache", cache.tensors, modes["kv_cache"])
            for tag in modes.keys() - {weights, "kv_cache"}:
                manager.add(tag, list, modes[tag])
        self.engine = PyExecutor(ModelEngine(model, loader), cache, args, self.mapping, self._respond)

    def _sleep_tags(self, tags: Any) -> list[str]:
        if self.llm_args._sleep_modes is None:
            setting = "sleep_config" if _family.SLEEP_CONFIG else "enable_sleep=True"
            raise ValueError(f"Sleep feature is not enabled, please set {setting} in the LLM arguments.")
        if not _family.SLEEP_CONFIG:
            verify_sleep_wakeup_tags(tags)
        return [ExecutorMemoryType(tag).value for tag in tags]

    @control_action_decorator
    def sleep(self, sleep_tags: Any) -> None:
        release_with_tag(*self._sleep_tags(sleep_tags))

    @control_action_decorator
    def wakeup(self, wakeup_tags: Any) -> None:
        materialize_with_tag(*self._sleep_tags(wakeup_tags))

    if _family.MEMORY_STATUS:

        def get_memory_status(self) -> dict:
            return manager.status()

    def start(self) -> None: ...

    def shutdown(self) -> None:
        if self.doing_shutdown:
            return
        self.doing_shutdown = True
        if self.engine is not None:
            self.engine.shutdown()
            time.sleep(0.1)  # the last answers leave
            self.engine = None


class _RayWorkerWrapper:
    def __init__(self, worker_cls: type, worker_kwargs: dict, world_size: int, rank: int) -> None:
        if leftover := sorted(name for name in os.environ if _LAUNCHERS.match(name)):
            print(f"[ompi] MPI_Init aborts: launched by another launcher? {', '.join(leftover)}", file=sys.stderr, flush=True)
            os._exit(134)
        self.master_address, self.world_size, self.rank = os.environ["MASTER_ADDR"], world_size, rank
        ids = ray.get_gpu_ids()
        self.gpu = int(ids[0]) if ids else rank
        self.local_gpu = self.gpu
        self.worker_cls = self._inject_worker_extension(worker_cls, worker_kwargs.pop("ray_worker_extension_cls", None))
        self.worker_kwargs = worker_kwargs

    def setup_tcp_store(self) -> int:
        if self.rank != 0:
            raise RuntimeError("Only the master worker can setup TCP store")
        if (owner := os.environ["TRTLLM_FAKE_OWNER_NODE"]) != ray.get_runtime_context().get_node_id():
            time.sleep(1.0)
            raise dist.DistNetworkError(
                f"The client socket has timed out after 300000ms while trying to connect to ({self.master_address}, 0): rank 0 serves on "
                f"another node than the owner's {owner}"
            )
        self.store = dist.TCPStore(self.master_address, 0, self.world_size, is_master=True, wait_for_workers=False)
        return self.store.port

    def setup_distributed_env_and_worker(self, port: int) -> None:
        if self.rank != 0:
            self.store = dist.TCPStore(self.master_address, port, self.world_size, is_master=False, wait_for_workers=False)
        dist.init_process_group("cpu:gloo", store=self.store, world_size=self.world_size, rank=self.rank)
        self.worker = self.worker_cls(device_id=self.local_gpu, **self.worker_kwargs)

    def _require_worker(self) -> RayGPUWorker:
        if not hasattr(self, "worker"):
            raise RuntimeError("Have not setup distributed environment and worker yet")
        return self.worker

    def submit(self, request: dict) -> None:
        return self._require_worker().submit(request)

    def abort_request(self, request_id: int) -> None:
        self._require_worker().abort_request(request_id)

    def report_device_id(self) -> str:
        self._require_worker()
        return get_device_uuid(self.local_gpu)

    def call_worker_method(self, method_name: str, *args, **kwargs) -> Any:
        worker = self._require_worker()
        if not hasattr(worker, method_name):
            raise AttributeError(f"The RayGPUWorker has no method called '{method_name}'.")
        method = getattr(worker, method_name)
        if not callable(method):
            raise AttributeError(f"'{method_name}' is not a callable method of RayGPUWorker.")
        return method(*args, **kwargs)

    def shutdown(self) -> None:
        if hasattr(self, "worker"):
            self.worker.shutdown()

    @staticmethod
    def _inject_worker_extension(worker_class: type, extension_cls_name: str | None) -> type:
        if not extension_cls_name:
            return worker_class
        try:
            extension = _resolve(extension_cls_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise RuntimeError(f"Failed to load worker extension '{extension_cls_name}'") from error
        for name in dir(extension):
            if not name.startswith("__") and hasattr(worker_class, name):
                raise ValueError(
                    f"Worker class {worker_class.__name__} already defines '{name}', which conflicts with extension {extension.__name__}."
                )
        made = f"{worker_class.__name__}With{extension.__name__}"
        return type(made, (worker_class, extension), {"__module__": worker_class.__module__})


RayWorkerWrapper = ray.remote(_RayWorkerWrapper)
