"""Messages between the tokenizer manager and the schedulers (sglang/srt/managers/io_struct.py): fields and defaults as there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerateReqInput:
    rid: str | None = field(default=None, kw_only=True)
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_sampling_mask: bool | None = None
    stream: bool = False

    def normalize_batch_and_arguments(self) -> None:
        if self.text is None and self.input_ids is None:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        if self.text is not None and self.input_ids is not None:
            raise ValueError("Either text, input_ids or input_embeds should be provided, not several.")
        if not self.input_ids or isinstance(self.input_ids[0], list) or self.stream:
            raise ValueError("the stand-in takes one prompt a request, whole")


@dataclass(kw_only=True)
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass(kw_only=True)
class ContinueGenerationReqInput:
    torch_empty_cache: bool = True


@dataclass(kw_only=True)
class AbortReq:
    rid: str = ""
    abort_all: bool = False


@dataclass(kw_only=True)
class FlushCacheReqInput:
    timeout_s: float | None = None


@dataclass(kw_only=True)
class FlushCacheReqOutput:
    success: bool
    message: str = ""


@dataclass(kw_only=True)
class UpdateWeightsFromTensorReqInput:
    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    disable_draft_model: bool | None = None
    torch_empty_cache: bool = False


@dataclass(kw_only=True)
class UpdateWeightsFromTensorReqOutput:
    success: bool
    message: str


@dataclass(kw_only=True)
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass(kw_only=True)
class ReleaseMemoryOccupationReqOutput:
    pass


@dataclass(kw_only=True)
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass(kw_only=True)
class ResumeMemoryOccupationReqOutput:
    pass


@dataclass(kw_only=True)
class CheckWeightsReqInput:
    action: str = "checksum"
    allow_quant_error: bool = False


@dataclass(kw_only=True)
class CheckWeightsReqOutput:
    success: bool
    message: str
    payload: list[dict[str, Any]] | None = None
