"""`ServerArgs`: the fields that a rollout may name, of about 400. An unknown one is a TypeError, as there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

FP8_GEMM = ("auto", "deep_gemm", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_deepgemm", "cutlass", "triton", "aiter")
MOE = ("auto", "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_cutlass", "cutlass", "marlin")


def _read(folder: str, name: str) -> dict:
    path = Path(folder) / name
    return json.loads(path.read_text()) if path.exists() else {}


@dataclass
class ServerArgs:
    model_path: str
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    trust_remote_code: bool = False
    context_length: int | None = None
    json_model_override_args: str = "{}"
    dtype: str = "auto"
    quantization: str | None = None
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    page_size: int | None = None
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    base_gpu_id: int = 0
    random_seed: int | None = None
    watchdog_timeout: float = 300
    log_level: str = "info"
    sampling_defaults: str = "model"
    attention_backend: str | None = None
    sampling_backend: str | None = None
    fp8_gemm_runner_backend: str = "auto"
    moe_runner_backend: str = "auto"
    moe_a2a_backend: str = "none"
    disable_cuda_graph: bool = False
    custom_weight_loader: list[str] | None = None
    enable_deterministic_inference: bool = False
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False

    def __post_init__(self) -> None:
        for field, choices in (
            ("fp8_gemm_runner_backend", FP8_GEMM),
            ("moe_runner_backend", MOE),
            ("sampling_defaults", ("openai", "model")),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} = {getattr(self, field)!r} is not one of {choices}")
        if self.tp_size % self.ep_size:
            raise AssertionError("tp_size must be divisible by ep_size")
        self.custom_weight_loader = self.custom_weight_loader or []
        self.hf_config = _read(self.model_path, "config.json") | json.loads(self.json_model_override_args)
        longest = self.hf_config["max_position_embeddings"]
        if (self.context_length or 0) > longest and os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") != "1":
            raise ValueError(
                f"User-specified context_length ({self.context_length}) is greater than the derived context_length ({longest})."
            )

    @property
    def context_len(self) -> int:
        return self.context_length or self.hf_config["max_position_embeddings"]

    @property
    def pool_tokens(self) -> int:
        return self.max_total_tokens or 65536

    @property
    def eos_token_ids(self) -> set[int]:
        """Of config.json and generation_config.json together."""
        found: set[int] = set()
        generation = _read(self.model_path, "generation_config.json")
        for eos in (self.hf_config.get("eos_token_id"), generation.get("eos_token_id")):
            found |= {eos} if isinstance(eos, int) else set(eos or ())
        return found
