"""`tensorrt_llm.sampling_params`: names, defaults and refusals of the LLM API's sampling parameters."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tensorrt_llm import _family


class LogprobMode(str, Enum):  # noqa: UP042  as in the package
    RAW = "raw"
    PROCESSED = "processed"


@dataclass(kw_only=True)
class _Params:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    _bad_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list | None = None
    lookahead_config: Any = None
    guided_decoding: Any = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        self._validate()

    def _validate(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.best_of > 1 and self._greedy_decoding and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"):
            raise ValueError(
                f"Greedy decoding in the LLM API does not allow multiple returns. Please set to best_of=1, got best_of={self.best_of}."
            )
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        # `True` becomes 1 in old releases and 0 in newer ones, as the reference notes say.
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                setattr(self, name, (0 if _family.LIFECYCLE else 1) if value else None)

    @property
    def _greedy_decoding(self) -> bool:
        given = (self.temperature, self.top_k, self.top_p)
        return not self.use_beam_search and (given == (None,) * 3 or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0)

    def _setup(self, tokenizer, hf_config=None, generation_config=None, add_special_tokens: bool = False):
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
            self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id
            extra = getattr(generation_config, "eos_token_id", None)
            if isinstance(extra, list):
                self.stop_token_ids = [*(self.stop_token_ids or []), *[t for t in extra if t != self.end_id]]
        for name, made in (("bad", "_bad_word_ids"), ("stop", "_stop_word_ids")):
            words = getattr(self, name)
            if words is not None:
                words = [words] if isinstance(words, str) else words
                setattr(self, made, [tokenizer.encode(w, add_special_tokens=add_special_tokens) for w in words])
        return self

    def _get_stop_words(self) -> list[list[int]]:
        words = [[t] for t in self.stop_token_ids or []]
        if self.stop is None:
            return words
        if self._stop_word_ids is None:
            raise RuntimeError(f"SamplingParams.stop ({self.stop}) is not processed by tokenizer, please call the setup method.")
        return words + self._stop_word_ids

    def _get_bad_words(self) -> list[list[int]]:
        words = [[t] for t in self.bad_token_ids or []]
        if self.bad is None:
            return words
        if self._bad_word_ids is None:
            raise RuntimeError(f"SamplingParams.bad ({self.bad}) is not processed by tokenizer, please call the setup method.")
        return words + self._bad_word_ids

    def _get_stop_reasons_and_words(self) -> list[tuple[Any, list[int]]]:
        strings = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else list(self.stop)
        return list(zip([*(self.stop_token_ids or []), *strings], self._get_stop_words(), strict=True))


if _family.LOGPROBS_MODE:

    @dataclass(kw_only=True)
    class SamplingParams(_Params):
        logprobs_mode: LogprobMode = LogprobMode.RAW
        logprobs_simple_format: bool = False
        prompt_logprobs_simple_format: bool = False

else:

    @dataclass(kw_only=True)
    class SamplingParams(_Params):
        pass
