"""`tensorrt_llm.llmapi.llm_args`: names and defaults of the PyTorch backend's arguments; unknown ones are refused."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tensorrt_llm import _family


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


_TAGS = {
    "SAMPLER": "sampler",
    "DRAFTER": "drafter",
    "GUIDED_DECODER": "guided_decoder",
    "SPEC_RESOURCES": "spec_resource_manager",
    "INIT_KV_CACHE": "_no_capture_init_kv_cache",
    "INIT_EXTRA_RESOURCES": "_no_capture_init_extra_resources",
    "MODEL_EXTRA": "model_extra",
    "EXTRA_RESOURCES": "executor_extra",
    "KV_CACHE": "kv_cache",
    "MODEL_ENGINE_MAIN": "model",
    "MODEL_ENGINE_DRAFT": "draft_model",
} | ({"MODEL_WEIGHTS_MAIN": "model_weights", "MODEL_WEIGHTS_DRAFT": "draft_model_weights"} if _family.SLEEP_CONFIG else {})
ExecutorMemoryType = Enum("ExecutorMemoryType", _TAGS, type=str, module=__name__)


class CapacitySchedulerPolicy(str, Enum):  # noqa: UP042  as in the package
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(str, Enum):  # noqa: UP042
    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class SchedulerConfig(StrictBaseModel):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: Any = None


class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    event_buffer_max_size: int = 0
    max_gpu_total_bytes: int = 0
    dtype: Literal["auto", "fp8", "nvfp4"] = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32
    use_kv_cache_manager_v2: bool = False


class CudaGraphConfig(StrictBaseModel):
    batch_sizes: list[int] | None = None
    max_batch_size: int = Field(default=0, ge=0)
    enable_padding: bool = False

    @model_validator(mode="after")
    def _size(self) -> CudaGraphConfig:
        self.max_batch_size = max(self.batch_sizes) if self.batch_sizes else self.max_batch_size or 128
        return self


class MoeConfig(StrictBaseModel):
    backend: Literal["AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = (
        "AUTO" if _family.SLEEP_CONFIG else "CUTLASS"
    )
    max_num_tokens: int | None = None
    load_balancer: Any = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class RayPlacementConfig(StrictBaseModel):
    defer_workers_init: bool = False
    placement_groups: list[Any] | None = None
    placement_bundle_indices: list[list[int]] | None = None
    per_worker_gpu_share: float | None = None

    @model_validator(mode="after")
    def _together(self) -> RayPlacementConfig:
        if self.per_worker_gpu_share is not None and not 0 < self.per_worker_gpu_share <= 1:
            raise ValueError(f"per_worker_gpu_share must be between 0 and 1.0, got {self.per_worker_gpu_share}")
        groups, indices = self.placement_groups, self.placement_bundle_indices
        if (groups is None) != (indices is None):
            raise ValueError("placement_groups and placement_bundle_indices must be provided together")
        if groups is not None:
            if len(groups) != len(indices):
                raise ValueError(f"placement_groups length ({len(groups)}) must equal placement_bundle_indices length ({len(indices)})")
            from ray.util.placement_group import PlacementGroup

            for i, group in enumerate(groups):
                if not isinstance(group, PlacementGroup):
                    raise TypeError(f"placement_groups[{i}] must be a Ray PlacementGroup, got {type(group).__name__}")
        return self


if _family.SLEEP_CONFIG:
    _MODES = {tag: "PINNED" if tag.value.endswith("weights") else "CPU" for tag in ExecutorMemoryType}

    class SleepConfig(StrictBaseModel):
        restore_modes: dict[ExecutorMemoryType, Literal["NONE", "MEMSET", "CPU", "PINNED"]] = Field(default_factory=dict)

        @model_validator(mode="after")
        def _fill(self) -> SleepConfig:
            self.restore_modes = _MODES | {ExecutorMemoryType("kv_cache"): "NONE"} | self.restore_modes
            return self


if _family.MEMORY_STATUS:

    class RuntimeMemoryStatus(StrictBaseModel):
        state: Literal["running", "parking", "parked", "waking", "failed"] = "running"
        parked_tags: list[ExecutorMemoryType] = Field(default_factory=list)


class _CommonLlmArgs(StrictBaseModel):
    model: Any
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    revision: str | None = None
    model_kwargs: dict[str, Any] | None = None
    backend: Literal["pytorch"] = "pytorch"
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    max_batch_size: int = 2048
    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    guided_decoding_backend: str | None = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    lora_config: Any = None
    enable_lora: bool = False
    speculative_config: Any = None
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    attention_dp_config: Any = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    attn_backend: str = "TRTLLM"
    sampler_type: str = "auto"
    disable_flashinfer_sampling: bool = False
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    return_perf_metrics: bool = False
    perf_metrics_max_requests: int = 0
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    garbage_collection_gen0_threshold: int = 20000
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    torch_compile_config: Any = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    load_format: Literal["auto", "dummy", "vision_only"] = "auto"
    enable_min_latency: bool = False
    stream_interval: int = 1
    force_dynamic_quantization: bool = False
    allreduce_strategy: Literal["AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"] = (
        "AUTO"
    )
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    orchestrator_type: Literal["rpc", "ray"] | None = None
    ray_worker_extension_cls: str | None = None
    ray_placement_config: RayPlacementConfig | None = None
    env_overrides: dict[str, str] | None = None

    @model_validator(mode="after")
    def _check(self) -> _CommonLlmArgs:
        if self.orchestrator_type != "ray" and (self.ray_worker_extension_cls or self.ray_placement_config):
            raise ValueError("ray_worker_extension_cls and ray_placement_config are only supported with orchestrator_type='ray'")
        if self.pipeline_parallel_size != 1 or self.context_parallel_size != 1 or self.enable_attention_dp:
            raise NotImplementedError("TRTLLM_FAKE: pipeline and context parallelism and attention DP are not modelled")
        tp, ep, moe_tp = self.tensor_parallel_size, self.moe_expert_parallel_size, self.moe_tensor_parallel_size
        ep = ep if ep is not None else tp // moe_tp if moe_tp else 1
        moe_tp = moe_tp if moe_tp is not None else tp // ep
        if ep * moe_tp * (self.moe_cluster_parallel_size or 1) != tp:
            raise ValueError(f"tp_size must equal to moe_tp_size * moe_ep_size * moe_cluster_size, but got {tp} != {moe_tp} * {ep} * 1")
        self.moe_expert_parallel_size, self.moe_tensor_parallel_size = ep, moe_tp
        return self

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size


if _family.SLEEP_CONFIG:

    class TorchLlmArgs(_CommonLlmArgs):
        sleep_config: SleepConfig | None = None

        @property
        def _sleep_modes(self) -> dict[str, str] | None:
            return None if self.sleep_config is None else {tag.value: mode for tag, mode in self.sleep_config.restore_modes.items()}

else:

    class TorchLlmArgs(_CommonLlmArgs):
        enable_sleep: bool = False

        @property
        def _sleep_modes(self) -> dict[str, str] | None:
            return {tag.value: "NONE" if tag.value == "kv_cache" else "CPU" for tag in ExecutorMemoryType} if self.enable_sleep else None


LlmArgs = TorchLlmArgs
BaseLlmArgs = TorchLlmArgs
