"""`tensorrt_llm._torch.distributed` and `Mapping`: ranks of one engine and their collectives, over gloo."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class Mapping:
    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    moe_ep_size: int = 1
    moe_tp_size: int = 1
    pp_size: int = 1
    enable_attention_dp: bool = False
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def moe_ep_rank(self) -> int:
        return self.tp_rank % self.moe_ep_size

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank // self.moe_ep_size


def allreduce(x: torch.Tensor, mapping: Mapping) -> torch.Tensor:
    wide = x.float().contiguous()
    dist.all_reduce(wide, group=mapping.group)
    return wide.to(x.dtype)


def allgather(x: torch.Tensor, mapping: Mapping) -> torch.Tensor:
    """Concatenate along the last dimension."""
    mine = x.float().contiguous()
    parts = [torch.empty_like(mine) for _ in range(mapping.tp_size)]
    dist.all_gather(parts, mine, group=mapping.group)
    return torch.cat(parts, -1).to(x.dtype)
