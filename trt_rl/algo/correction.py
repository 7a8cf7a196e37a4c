"""The gap between the engine that sampled and the trainer that learns: its correction and its measures."""

from __future__ import annotations

import torch


def truncated_importance(old_logp_N_S: torch.Tensor, engine_logp_N_S: torch.Tensor, mask_N_S: torch.Tensor, cap: float) -> torch.Tensor:
    """Token weights `min(pi_old / pi_engine, cap)`; 1 outside the mask.

    Truncated importance sampling between the trainer before its update (`old`) and the rollout engine:
    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025. An engine
    log-prob of a token that the trainer finds impossible gives weight 0, never NaN.
    """
    ratio = torch.exp((old_logp_N_S - engine_logp_N_S).clamp(max=20.0))
    return torch.where(mask_N_S > 0, ratio.clamp(max=cap), torch.ones_like(ratio))


def mismatch_metrics(old_logp_N_S: torch.Tensor, engine_logp_N_S: torch.Tensor, mask_N_S: torch.Tensor) -> dict[str, float]:
    """How far trainer and engine disagree about the sampled tokens.

    * `mismatch_kl`: KL(engine || trainer), Schulman's k3 estimator `exp(d) - d - 1` with d = trainer - engine.
    * `token_mult_prob_error`: mean of exp(|d|), NeMo-RL's alarm metric; 1 means equal.
    * `mismatch_abs_logp`: mean |d| in nats.  `mismatch_max_logp`: largest |d|.
    """
    chosen = mask_N_S > 0
    d = (old_logp_N_S - engine_logp_N_S)[chosen].double()
    if d.numel() == 0:
        return {}
    return {
        "mismatch_kl": (torch.exp(d) - d - 1).mean().item(),
        "token_mult_prob_error": torch.exp(d.abs()).mean().item(),
        "mismatch_abs_logp": d.abs().mean().item(),
        "mismatch_max_logp": d.abs().max().item(),
    }
