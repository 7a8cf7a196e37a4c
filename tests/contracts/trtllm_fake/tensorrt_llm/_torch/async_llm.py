"""`tensorrt_llm._torch.async_llm`: `AsyncLLM`, the engine of reinforcement-learning stacks, on Ray only."""

from __future__ import annotations

from typing import Any

from tensorrt_llm import _family
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, RayPlacementConfig

if _family.MEMORY_STATUS:
    from tensorrt_llm.llmapi.llm_args import RuntimeMemoryStatus


class AsyncLLM(LLM):
    def __init__(
        self,
        placement_groups: list[Any] | None = None,
        placement_bundle_indices: list[list[int]] | None = None,
        per_worker_gpu_share: float | None = None,
        *args,
        **kwargs,
    ) -> None:
        kwargs["orchestrator_type"] = "ray"
        kwargs["ray_placement_config"] = RayPlacementConfig(
            defer_workers_init=True,
            placement_groups=placement_groups,
            placement_bundle_indices=placement_bundle_indices,
            per_worker_gpu_share=per_worker_gpu_share,
        )
        if _family.FORCES_NCCL:
            kwargs["allreduce_strategy"] = "NCCL"
        kwargs.setdefault("ray_worker_extension_cls", "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension")
        super().__init__(*args, **kwargs)
        self._async_initialized = False
        self._paused = False

    async def setup_async(self) -> AsyncLLM:
        if not self._async_initialized:
            await self._executor.init_workers_async()
            await self._executor.setup_engine_remote_async()
            self._async_initialized = True
        return self

    if _family.MEMORY_STATUS:

        def _check_runtime_memory_enabled(self) -> None:
            if self.args.sleep_config is None:
                raise ValueError("Sleep feature is not enabled, please set sleep_config in the LLM arguments.")

        async def get_memory_status(self) -> RuntimeMemoryStatus:
            self._check_runtime_memory_enabled()
            statuses = [RuntimeMemoryStatus.model_validate(reply) for reply in await self.collective_rpc("get_memory_status")]
            if any(status != statuses[0] for status in statuses[1:]):
                raise RuntimeError(f"Runtime-memory state diverged across workers: {statuses}")
            return statuses[0]

        async def release(self, tags: Any = None) -> None:
            self._check_runtime_memory_enabled()
            tags = [t for t in ExecutorMemoryType if not t.value.startswith("_no_capture")] if tags is None else tags
            await self.collective_rpc("sleep", args=([ExecutorMemoryType(t).value for t in tags],))

        async def resume(self, tags: Any = None) -> None:
            self._check_runtime_memory_enabled()
            tags = (await self.get_memory_status()).parked_tags if tags is None else tags
            if tags:
                await self.collective_rpc("wakeup", args=([ExecutorMemoryType(t).value for t in tags],))

    else:

        async def release(self, tags: list[str]) -> None:
            await self.collective_rpc("sleep", args=(tags,))

        async def resume(self, tags: list[str]) -> None:
            await self.collective_rpc("wakeup", args=(tags,))

    async def update_weights(self, weights: dict[str, str] | None) -> None:
        await self.collective_rpc("update_weights", args=(weights,))

    if _family.TARGET_RANKS:

        async def collective_rpc(
            self,
            method: str,
            args: tuple = (),
            kwargs: dict | None = None,
            unique_reply_rank: int | None = None,
            target_ranks: int | list[int] | None = None,
        ) -> list[Any]:
            return await self._executor.collective_rpc_async(method, args, kwargs, unique_reply_rank, target_ranks)

    else:

        async def collective_rpc(
            self, method: str, args: tuple = (), kwargs: dict | None = None, unique_reply_rank: int | None = None
        ) -> list[Any]:
            return await self._executor.collective_rpc_async(method, args, kwargs, unique_reply_rank)

    if _family.PAUSE:

        async def pause_generation(self) -> None:
            """End what runs, with what it has, and refuse new requests until `resume_generation`."""
            self._paused = True
            self._executor.abort_all_requests()
            await self.collective_rpc("wait_for_engine_idle")

        async def resume_generation(self) -> None:
            self._paused = False

        def generate_async(self, *args, **kwargs):
            if self._paused:
                raise RuntimeError("AsyncLLM is paused. Call resume_generation() before submitting new requests.")
            return super().generate_async(*args, **kwargs)

    def __await__(self):
        return self.setup_async().__await__()

    def __enter__(self):
        raise RuntimeError("Please use 'async with AsyncLLM' instead")

    async def __aenter__(self) -> AsyncLLM:
        await self.setup_async()
        return super().__enter__()

    async def __aexit__(self, exc_type, exc_val, exc_tb) -> None:
        return super().__exit__(exc_type, exc_val, exc_tb)
