"""The batch that goes from the driver to the trainer: padded tensors, one row a sample.

Suffixes: N samples, S positions. Per-token values are aligned with predictions: column t of `mask`,
`advantages` or any log-prob concerns `tokens[:, t + 1]`, the token that position t predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Batch:
    tokens_N_S: torch.Tensor  # int64, right-padded with 0
    lengths_N: torch.Tensor  # int64, prompt + response tokens
    mask_N_S: torch.Tensor  # float32, 1 where the predicted token belongs to the response
    engine_logp_N_S: torch.Tensor  # float32, reported by the rollout engine
    advantages_N_S: torch.Tensor  # float32
    old_logp_N_S: torch.Tensor  # float32, of the policy before this step's updates
    correction_N_S: torch.Tensor  # float32, importance weight between engine and trainer
    weights_N_S: torch.Tensor  # float32, share of each token in the loss of its mini-batch

    def __len__(self) -> int:
        return len(self.lengths_N)

    def rows(self, index: torch.Tensor | list[int] | slice) -> Batch:
        return Batch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def with_(self, **changes: torch.Tensor) -> Batch:
        return replace(self, **changes)

    def minibatches(self, count: int) -> list[Batch]:
        """`count` consecutive parts; the caller has made sure that `count` divides the rows."""
        size = len(self) // count
        return [self.rows(slice(i * size, (i + 1) * size)) for i in range(count)]


def make_batch(prompts: list[list[int]], responses: list[list[int]], engine_logps: list[list[float]]) -> Batch:
    """Pad samples into one batch; advantages, old log-probs and weights start as zeros, corrections as ones."""
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    shape = (len(lengths), max(lengths))
    tokens = torch.zeros(shape, dtype=torch.int64)
    mask, engine = torch.zeros(shape), torch.zeros(shape)
    for row, (prompt, response, logp) in enumerate(zip(prompts, responses, engine_logps, strict=True)):
        tokens[row, : lengths[row]] = torch.tensor(prompt + response)
        first, last = len(prompt) - 1, lengths[row] - 1
        mask[row, first:last] = 1.0
        engine[row, first:last] = torch.tensor(logp)
    zeros = torch.zeros(shape)
    return Batch(tokens, torch.tensor(lengths), mask, engine, zeros, zeros, torch.ones(shape), zeros)
