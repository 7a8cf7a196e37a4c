"""Log-probabilities and entropy of given tokens from vocabulary-parallel logits, a chunk of tokens at a time.

The full FP32 `[tokens, vocabulary]` array never exists: each chunk is widened, reduced and dropped, forward
and backward. Suffixes: T tokens, V this rank's vocabulary columns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def token_logprobs(
    logits_T_V: torch.Tensor,
    target_T: torch.Tensor,
    *,
    first_column: int,
    vocab: int,
    temperature: float = 1.0,
    chunk: int = 1024,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `target_T` and entropy of `softmax(logits / temperature)`, both FP32 `[T]`.

    Args:
        logits_T_V: this rank's columns, any float dtype; differentiable.
        target_T: token ids in `[0, vocab)`.
        first_column: vocabulary id of column 0 on this rank.
        vocab: true vocabulary size; columns at or beyond it are padding and take no probability.
        temperature: the sampling temperature, so that the distribution is the one that sampled.
        chunk: tokens widened to FP32 at once.
        group: the tensor-parallel group; `None` means the columns are the whole vocabulary.

    The entropy carries no gradient.
    """
    columns = max(0, min(logits_T_V.shape[1], vocab - first_column))
    return _ChunkedLogProbs.apply(logits_T_V, target_T, first_column, columns, temperature, chunk, group)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, first, columns, temperature, chunk, group):
        tokens = logits.shape[0]
        peak = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=logits.device)
        # Rows: sum of exponentials, sum of exponentials times logit, logit of the target. One reduction for all.
        sums = torch.zeros(3, tokens, dtype=torch.float32, device=logits.device)
        for at in _chunks(tokens, chunk):
            x = logits[at, :columns].float() / temperature
            if columns:
                peak[at] = x.amax(-1)
            e = torch.exp(x - peak[at].unsqueeze(-1))
            sums[0, at], sums[1, at] = e.sum(-1), (e * x).sum(-1)
            local, here = _local_target(target[at], first, columns)
            if columns:
                sums[2, at] = x.gather(-1, local.unsqueeze(-1)).squeeze(-1) * here
        own_peak = peak.clone()
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= torch.exp(own_peak - peak)
            dist.all_reduce(sums, group=group)
        log_z = peak + sums[0].log()
        ctx.save_for_backward(logits, target, log_z)
        ctx.settings = (first, columns, temperature, chunk)
        entropy = log_z - sums[1] / sums[0]
        ctx.mark_non_differentiable(entropy)
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx, grad_logp, _grad_entropy):
        logits, target, log_z = ctx.saved_tensors
        first, columns, temperature, chunk = ctx.settings
        grad = torch.zeros_like(logits)
        if columns:
            for at in _chunks(logits.shape[0], chunk):
                scale = (grad_logp[at] / temperature).unsqueeze(-1)
                x = logits[at, :columns].float() / temperature
                g = torch.exp(x - log_z[at].unsqueeze(-1)).mul_(-scale)
                local, here = _local_target(target[at], first, columns)
                g.scatter_add_(-1, local.unsqueeze(-1), scale * here.unsqueeze(-1))
                grad[at, :columns] = g.to(grad.dtype)
        return grad, None, None, None, None, None, None


def _chunks(total: int, size: int):
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _local_target(target, first, columns):
    local = target - first
    here = (local >= 0) & (local < columns)
    return local.clamp(0, max(columns - 1, 0)), here.float()
