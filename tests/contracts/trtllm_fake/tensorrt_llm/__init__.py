"""A stand-in for TensorRT-LLM that holds an adapter to the real package's contract, on a machine without a GPU.

It is put on PYTHONPATH as `tests/contracts/trtllm_fake` and imported as `tensorrt_llm`. Names, signatures, refusals and
the order of things follow the package's sources; token generation is real, by Ray
worker processes that hold tensor- and expert-parallel slices. No code of the package is in here.

Environment, read by the owner and handed to the workers:
    TRTLLM_FAKE_VERSION             1.2.1, 1.3.0rc15 (default), 1.3.0rc29 or 1.4.0rc1: which release's contract
    TRTLLM_FAKE_FAIL_RELOAD_RANK    this rank's `reload` raises
    TRTLLM_FAKE_FLIP_BIT_RANK       after finalise, this rank flips one bit of
    TRTLLM_FAKE_FLIP_BIT_PARAMETER  ... this live parameter (model.norm.weight)
    TRTLLM_FAKE_DEEPGEMM_KEYERROR   an FP8 weight without its scale in the same reload is a KeyError (early DeepGEMM)
    TRTLLM_FAKE_FIRST_SHARD_SCALE   block scales of k, v, up are dropped in silence unless q's, gate's are in the same reload
    TRTLLM_FAKE_BLACKWELL           FP8 parameters become new objects when finalised, and again at the first bucket
    TRTLLM_FAKE_HANG_ON_DEATH       requests of a dead worker wait for ever instead of failing
    TRTLLM_FAKE_NESTED_TIMEOUT_S    seconds after which a nested control action, a deadlock in older releases, fails (5)
"""

from tensorrt_llm._family import VERSION as __version__
from tensorrt_llm.sampling_params import SamplingParams

from tensorrt_llm.llmapi.llm import LLM, RequestOutput  # isort: skip
from tensorrt_llm._torch.async_llm import AsyncLLM  # isort: skip
from tensorrt_llm.logger import logger

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__", "logger"]
