"""TorchSampler's order of things: temperature, top-k, top-p; then end id, length, stop words."""

from __future__ import annotations

from typing import Any

import torch

from tensorrt_llm import _family


def processed(logits_V: torch.Tensor, params: Any) -> torch.Tensor:
    """Log-probabilities of the distribution that is sampled."""
    if params._greedy_decoding:
        return torch.log_softmax(logits_V, -1)
    logp = torch.log_softmax(logits_V / (params.temperature or 1.0), -1)
    vocab = logp.shape[-1]
    top_k, top_p = params.top_k or vocab, 1.0 if params.top_p is None else params.top_p
    if top_k >= vocab and top_p >= 1:
        return logp
    values, order = logp.sort(descending=True)
    keep = torch.arange(vocab) < top_k
    p = values.exp() * keep
    p /= p.sum()
    keep &= (p.cumsum(-1) - p) < top_p
    return torch.log_softmax(torch.full_like(logp, -torch.inf).scatter(-1, order, values.masked_fill(~keep, -torch.inf)), -1)


def sample(logits_V: torch.Tensor, params: Any, uniform: float) -> tuple[int, dict[int, tuple[float, int]] | None]:
    """The token, and log-probability and rank of it and of the likeliest ones if they were asked for."""
    logp = processed(logits_V, params)
    if params._greedy_decoding:
        token = int(logits_V.argmax())
    else:
        cumulative = logp.double().exp().cumsum(-1)
        token = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True).clamp(max=len(logp) - 1))
    # `logprobs=0` asks for the sampled token's only; releases before that was told apart from None give nothing.
    if params.logprobs is None or (params.logprobs == 0 and not _family.LOGPROBS_MODE):
        return token, None
    mode = getattr(params, "logprobs_mode", "raw")
    shown = logp if getattr(mode, "value", mode) == "processed" else torch.log_softmax(logits_V, -1)
    order = shown.argsort(descending=True)
    chosen = [*order[: params.logprobs].tolist(), token]
    rank_of = {int(t): i + 1 for i, t in enumerate(order.tolist())}
    return token, {t: (float(shown[t]), rank_of[t]) for t in dict.fromkeys(chosen)}


def finish_reason(tokens: list[int], params: Any, max_tokens: int) -> str | None:
    """'end_id', 'length', 'stop_words' or None."""
    if not params.ignore_eos and tokens[-1] == params.end_id and len(tokens) >= (params.min_tokens or 0):
        return "end_id"
    if len(tokens) >= max_tokens:
        return "length"
    if any(tokens[-len(word) :] == word for word in params._get_stop_words()) and len(tokens) >= (params.min_tokens or 0):
        return "stop_words"
    return None
