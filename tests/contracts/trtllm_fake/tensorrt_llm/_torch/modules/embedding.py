"""`tensorrt_llm._torch.modules.embedding`: vocabulary rows cut into ceil(V / tp), the last rank's rest is zero padding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tensorrt_llm._torch.distributed import Mapping, allreduce
from tensorrt_llm._torch.modules.linear import Linear, TensorParallelMode


class LMHead(Linear):
    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype, mapping: Mapping, gather_output: bool = True) -> None:
        each = math.ceil(num_embeddings / mapping.tp_size)
        super().__init__(embedding_dim, each * mapping.tp_size, dtype, mapping, TensorParallelMode.COLUMN, gather_output=gather_output)
        self.num_embeddings, self.padding_size = num_embeddings, each * mapping.tp_size - num_embeddings
        self.weight.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[..., : self.num_embeddings]

    def load_weights(self, weights: list[dict], allow_partial_loading: bool = False) -> None:
        if self.padding_size == 0 or self.tp_rank != self.tp_size - 1:
            return super().load_weights(weights, allow_partial_loading)
        whole = self.weight.data.zero_()
        self.weight.data = whole[: -self.padding_size]
        super().load_weights(weights, allow_partial_loading)
        self.weight.data = whole


class Embedding(LMHead):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.tp_size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.tp_rank * self.out_features
        mine = (local >= 0) & (local < self.out_features)
        return allreduce(F.embedding(local * mine, self.weight) * mine.unsqueeze(-1), self.mapping)
