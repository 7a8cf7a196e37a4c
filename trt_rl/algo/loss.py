"""Policy losses: pure functions on tensors. Suffixes: N samples, S positions."""

from __future__ import annotations

import torch


def token_weights(mask_N_S: torch.Tensor, aggregation: str) -> torch.Tensor:
    """Share of every token in the loss of its mini-batch; the shares of a mini-batch sum to 1.

    `token_mean` gives each token of the global batch the same share (DAPO, arXiv 2503.14476, section 3.3);
    `sequence_mean` gives each sequence the same share, split evenly over its tokens (GRPO, arXiv 2402.03300).
    """
    if aggregation == "token_mean":
        return mask_N_S / mask_N_S.sum().clamp(min=1)
    if aggregation == "sequence_mean":
        per_row = mask_N_S.sum(-1, keepdim=True)
        sequences = (per_row > 0).sum().clamp(min=1)
        return mask_N_S / per_row.clamp(min=1) / sequences
    raise ValueError(f"aggregation must be token_mean or sequence_mean, not {aggregation!r}")


def clipped_policy_loss(
    logp_N_S: torch.Tensor,
    old_logp_N_S: torch.Tensor,
    advantages_N_S: torch.Tensor,
    correction_N_S: torch.Tensor,
    weights_N_S: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate with separate lower and upper bounds (DAPO's clip-higher), weighted per token.

    Args:
        correction_N_S: importance weights between engine and trainer; constants.
        weights_N_S: see `token_weights`; they make the sum an average over the mini-batch.
        clip_low, clip_high: the ratio is clipped to `[1 - clip_low, 1 + clip_high]`; DAPO: 0.2 and 0.28.
        dual_clip: with a negative advantage the loss is at most `-dual_clip * advantage` (Ye et al., arXiv 1912.09729).

    Returns:
        The loss (a sum over the given rows) and weighted sums of `ppo_kl` (old minus new log-prob) and
        `clip_fraction`: added over all rows of a mini-batch they are its means.
    """
    live = weights_N_S > 0
    # Outside the mask log-probs are of padding; their ratio must not overflow into NaN * 0.
    difference = torch.where(live, logp_N_S - old_logp_N_S, torch.zeros_like(logp_N_S)).clamp(-20.0, 20.0)
    ratio = torch.exp(difference)
    plain = -advantages_N_S * ratio
    clipped = -advantages_N_S * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.maximum(plain, clipped)
    if dual_clip is not None:
        bounded = torch.minimum(per_token, -advantages_N_S * dual_clip)
        per_token = torch.where(advantages_N_S < 0, bounded, per_token)
    loss = (per_token * correction_N_S * weights_N_S).sum()
    with torch.no_grad():
        sums = {
            "ppo_kl": -(difference * weights_N_S).sum(),
            "clip_fraction": ((clipped > plain).float() * weights_N_S).sum(),
        }
    return loss, sums
