"""`tensorrt_llm.mapping`."""

from tensorrt_llm._torch.distributed import Mapping

__all__ = ["Mapping"]
