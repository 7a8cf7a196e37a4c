"""`tensorrt_llm.llmapi.llm`: `LLM`, as far as `AsyncLLM` needs it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tensorrt_llm import _family
from tensorrt_llm.executor.result import GenerationResult
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams


class RequestOutput(GenerationResult):
    """What `generate_async` gives: awaitable, iterable, filled in place."""

    prompt: str | None = None

    def __repr__(self) -> str:
        return f"RequestOutput(request_id={self.id}, prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs}, finished={self.finished})"


class LLM:
    def __init__(
        self, model: Any, tokenizer: Any = None, tokenizer_mode="auto", skip_tokenizer_init=False, trust_remote_code=False,
        tensor_parallel_size: int = 1, dtype: str = "auto", revision=None, **kwargs,
    ) -> None:  # fmt: skip
        from tensorrt_llm._fake_executor import RayExecutor

        if kwargs.get("orchestrator_type") != "ray":
            raise NotImplementedError("TRTLLM_FAKE: only orchestrator_type='ray' is modelled")
        self.args = TorchLlmArgs(
            model=model, tokenizer=tokenizer, tokenizer_mode=tokenizer_mode, skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code, tensor_parallel_size=tensor_parallel_size, dtype=dtype, revision=revision, **kwargs,
        )  # fmt: skip
        folder = Path(model)
        if not (folder / "config.json").exists():
            raise ValueError(f"{model} is no folder with a config.json")
        self._tokenizer = tokenizer
        if tokenizer is None and not skip_tokenizer_init and any(folder.glob("tokenizer*")):
            import transformers

            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._executor = RayExecutor(self.args, str(folder))

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def generate_async(
        self, inputs: Any, sampling_params: SamplingParams | None = None, lora_request=None, prompt_adapter_request=None,
        streaming: bool = False, kv_cache_retention_config=None, disaggregated_params=None, trace_headers=None, _postproc_params=None,
        scheduling_params=None, cache_salt: str | None = None,
    ) -> RequestOutput:  # fmt: skip
        if self._executor is None or self._executor._stopping:
            raise RuntimeError("LLM is shutting down")
        for name, value in (("lora_request", lora_request), ("disaggregated_params", disaggregated_params), ("cache_salt", cache_salt)):
            if value is not None:
                raise NotImplementedError(f"TRTLLM_FAKE: {name} is not modelled")
        params = self._prepare_sampling_params(sampling_params)
        if params.n > self.args.max_batch_size:
            raise ValueError(f"SamplingParams.n ({params.n}) should not exceed max_batch_size ({self.args.max_batch_size})")
        if params.best_of > 1 or params.use_beam_search:
            raise NotImplementedError("TRTLLM_FAKE: one sequence a request")
        if isinstance(inputs, dict):
            inputs = inputs["prompt_token_ids"] if "prompt_token_ids" in inputs else inputs["prompt"]
        if isinstance(inputs, str):
            if self.tokenizer is None:
                raise ValueError("tokenizer is required to tokenize string prompt")
            inputs = self.tokenizer.encode(inputs, add_special_tokens=params.add_special_tokens)
        if not isinstance(inputs, list) or not all(isinstance(t, int) for t in inputs):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        if not self.args.enable_chunked_prefill and len(inputs) > self.args.max_num_tokens:
            raise ValueError(
                f"The sum of prompt length ({len(inputs) / 1}), query length (0) should not exceed max_num_tokens ({self.args.max_num_tokens})"
            )
        if not inputs:
            raise ValueError("prompt_token_ids is empty")
        return self._executor.generate_async(list(inputs), copy.deepcopy(params), streaming, RequestOutput)

    def _prepare_sampling_params(self, sampling_params: SamplingParams | None) -> SamplingParams:
        if sampling_params is None:
            if self.tokenizer is None:
                raise ValueError(
                    "tokenizer is required to initialize a default sampling_params, or you can explicitly specify a sampling_params"
                )
            return SamplingParams(end_id=self.tokenizer.eos_token_id, pad_id=self.tokenizer.pad_token_id)
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(sampling_params)}")
        if sampling_params.end_id is None:
            if self.tokenizer is None:
                raise ValueError(
                    "tokenizer is required to reset end_id if it is None, or you can explicitly specify the end_id for sampling_params"
                )
            sampling_params._setup(self.tokenizer)
        if self.tokenizer is None:
            sampling_params._get_stop_words()
            sampling_params._get_bad_words()
        return sampling_params

    def _collective_rpc(
        self, method, args=(), kwargs=None, non_block=False, unique_reply_rank=None, **target
    ) -> list[Any]:  # fmt: skip
        if target and not _family.TARGET_RANKS:
            raise TypeError(f"_collective_rpc() got an unexpected keyword argument '{next(iter(target))}'")
        return self._executor.collective_rpc(method, args, kwargs, non_block, unique_reply_rank, **target)

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
