"""Draw the next token of many requests at once. Suffixes: B requests, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trt_rl.rollout.engine import Sampling


def sample(logits_B_V: torch.Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token per row and its log-probability under the distribution that was sampled.

    Temperature first, then top-k, then top-p over what is left, as in vLLM. A row's draw depends only on its
    logits and its uniform number in [0, 1), so the batch it shares does not change it.
    """
    device = logits_B_V.device
    temperature = torch.tensor([s.temperature or 1.0 for s in settings], dtype=torch.float32, device=device).unsqueeze(-1)
    logp = torch.log_softmax(logits_B_V.float() / temperature, dim=-1)
    truncated = [i for i, s in enumerate(settings) if s.temperature and (s.top_p < 1 or s.top_k)]
    if truncated:
        logp[truncated] = _truncate(logp[truncated], [settings[i] for i in truncated])
    cumulative = logp.double().exp().cumsum(-1)
    # Scaling by the last entry keeps a uniform number near 1 inside the distribution despite rounding.
    threshold = torch.tensor(uniforms, dtype=torch.float64, device=device).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    greedy = torch.tensor([s.temperature == 0 for s in settings], device=device)
    chosen = torch.where(greedy, logp.argmax(-1), drawn)
    return chosen.tolist(), logp.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist()


def _truncate(logp: torch.Tensor, settings: list[Sampling]) -> torch.Tensor:
    vocab, device = logp.shape[-1], logp.device
    values, order = logp.sort(dim=-1, descending=True)
    keep_k = torch.tensor([s.top_k or vocab for s in settings], device=device).unsqueeze(-1)
    within_k = torch.arange(vocab, device=device) < keep_k
    probabilities = values.exp() * within_k
    probabilities /= probabilities.sum(-1, keepdim=True)
    before = probabilities.cumsum(-1) - probabilities
    top_p = torch.tensor([s.top_p for s in settings], device=device).unsqueeze(-1)
    keep = within_k & (before < top_p)
    kept = torch.full_like(logp, -torch.inf).scatter(-1, order, values.masked_fill(~keep, -torch.inf))
    return torch.log_softmax(kept, dim=-1)
