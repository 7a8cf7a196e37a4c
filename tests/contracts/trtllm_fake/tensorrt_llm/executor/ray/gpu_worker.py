from tensorrt_llm._fake_worker import RayGPUWorker, RayWorkerWrapper

__all__ = ["RayGPUWorker", "RayWorkerWrapper"]
