"""`tensorrt_llm.llmapi`."""

from tensorrt_llm import _family
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    KvCacheConfig,
    LlmArgs,
    MoeConfig,
    RayPlacementConfig,
    SchedulerConfig,
    TorchLlmArgs,
)
from tensorrt_llm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "KvCacheConfig",
    "LlmArgs",
    "MoeConfig",
    "RayPlacementConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchLlmArgs",
]
if _family.SLEEP_CONFIG:
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, SleepConfig

    __all__ += ["ExecutorMemoryType", "SleepConfig"]
