from tensorrt_llm._fake_executor import RayExecutor

__all__ = ["RayExecutor"]
