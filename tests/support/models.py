"""Small random Qwen3 models written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    vocab_size=130,
    max_position_embeddings=256,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1)


def write_model(folder: Path, kind: str = "dense", dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 0.0, **sizes) -> Path:
    """`kind`: dense, tied (dense with tied embeddings) or moe. With a `spread`, each tensor has larger values than the
    one before, and a quantization scale of its own."""
    import transformers

    torch.manual_seed(seed)
    settings = SIZES | (MOE if kind == "moe" else {}) | {"tie_word_embeddings": kind == "tied"} | sizes
    config_class = transformers.Qwen3MoeConfig if kind == "moe" else transformers.Qwen3Config
    model_class = transformers.Qwen3MoeForCausalLM if kind == "moe" else transformers.Qwen3ForCausalLM
    model = model_class(config_class(**settings))
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            # Norm weights start at 1, which would hide a swapped pair; make every tensor distinct.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 * (1 + spread * i))
    model.to(dtype).save_pretrained(folder)
    return folder


def hf_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(tokens).logits
