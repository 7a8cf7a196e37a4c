"""`tensorrt_llm.executor.ray_gpu_worker`, before 1.4."""

from tensorrt_llm import _family

_family.only_in(__name__, not _family.NEW_LAYOUT)
from tensorrt_llm._fake_worker import RayGPUWorker, RayWorkerWrapper  # noqa: E402

__all__ = ["RayGPUWorker", "RayWorkerWrapper"]
