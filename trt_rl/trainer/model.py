"""From a Qwen3 `config.json` to this rank's Megatron-core `GPTModel`."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from trt_rl.arch import Arch
from trt_rl.errors import RecipeError
from trt_rl.layout import Layout
from trt_rl.plan.megatron import unknown_fields

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in FP32 that marks its weight for sequence-parallel gradient reduction.

    Megatron's own `WrappedTorchNorm` refuses sequence parallelism, which MoE with tensor parallelism needs.
    The rounding order is transformers' `Qwen3RMSNorm`: normalise in FP32, round, then multiply by the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def start_parallel_state(layout: Layout, seed: int) -> None:
    """Create Megatron's process groups over the already initialised default group, and seed its RNG tracker."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(seed)


def transformer_config(arch: Arch, layout: Layout, precision: str, overrides: dict) -> TransformerConfig:
    """Megatron's configuration of `arch`; `overrides` are the recipe's `trainer.megatron` keys."""
    on_gpu = torch.cuda.is_available()
    if unknown := list(unknown_fields(overrides)):  # the plan knows only where Megatron is installed
        raise RecipeError("; ".join(unknown))
    if layout.cp > 1 and not on_gpu:
        raise RecipeError(
            f"trainer.parallel.cp = {layout.cp} needs CUDA: only Transformer Engine's attention can be cut along the sequence"
        )
    dtype = DTYPES[precision]
    settings = dict(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        enable_autocast=False,
        variable_seq_lengths=layout.pp > 1,  # micro-batches differ in shape; stages announce theirs
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        # Initialisation also marks parameters as tensor parallel; without it the gradient norm misses shards.
        perform_initialization=True,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        apply_rope_fusion=on_gpu,
        masked_softmax_fusion=False,
        persist_layer_norm=on_gpu,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="alltoall",  # also asked of dense models when shapes vary between stages
    )
    if arch.experts:
        settings |= dict(
            num_moe_experts=arch.experts,
            moe_router_topk=arch.experts_per_token,
            moe_ffn_hidden_size=arch.moe_ffn,
            moe_layer_freq=[int(i in arch.moe_layers) for i in range(arch.layers)],
            moe_router_pre_softmax=not arch.norm_topk,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_router_dtype="fp32",
            moe_grouped_gemm=on_gpu,
            moe_permute_fusion=on_gpu,
        )
    return TransformerConfig(**(settings | overrides))


def layer_spec(config: TransformerConfig):
    """Transformer Engine layers where CUDA is present, Megatron's local layers with our RMSNorm otherwise."""
    if torch.cuda.is_available():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return dataclasses.replace(block, layer_specs=[_with_our_norm(spec) for spec in block.layer_specs], layer_norm=RMSNorm)


def _with_our_norm(spec: ModuleSpec) -> ModuleSpec:
    attention = spec.submodules.self_attention
    attention = dataclasses.replace(
        attention, submodules=dataclasses.replace(attention.submodules, q_layernorm=RMSNorm, k_layernorm=RMSNorm)
    )
    submodules = dataclasses.replace(spec.submodules, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, self_attention=attention)
    return dataclasses.replace(spec, submodules=submodules)


def build_model(arch: Arch, layout: Layout, precision: str = "bf16", overrides: dict | None = None) -> GPTModel:
    """This rank's part of the model, weights not yet meaningful. Parallel state must be up."""
    config = transformer_config(arch, layout, precision, overrides or {})
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=arch.padded_vocab(layout.tp),
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
    )
    return model.to(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")
