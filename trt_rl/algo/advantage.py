"""Advantages from rewards of groups of samples that share a prompt. Suffixes: P prompts, G samples a prompt."""

from __future__ import annotations

import torch


def grpo_advantages(rewards_P_G: torch.Tensor, valid_P_G: torch.Tensor, normalize_std: bool = True, eps: float = 1e-6) -> torch.Tensor:
    """Group-relative advantages: reward minus the group's mean, divided by its standard deviation.

    Samples with `valid == 0` (their reward function failed) neither count nor learn: their advantage is 0.
    The deviation is the unbiased estimate, as in verl. Shao et al., arXiv 2402.03300; without the division it is
    Dr. GRPO's, Liu et al., arXiv 2503.20783.
    """
    count = valid_P_G.sum(-1, keepdim=True).clamp(min=1)
    rewards = torch.where(valid_P_G.bool(), rewards_P_G, torch.zeros_like(rewards_P_G))
    centred = (rewards - rewards.sum(-1, keepdim=True) / count) * valid_P_G
    if not normalize_std:
        return centred
    variance = centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)
