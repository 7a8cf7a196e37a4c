"""Exact numbers of parameters: of a model, of each trainer rank, of each engine rank with its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from trt_rl.arch import Arch
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.engine_shards import wanted
from trt_rl.refit.names import parameters
from trt_rl.refit.precision import PrecisionTable, grid

_WIRE_BYTES = {"bf16": 2, "fp8_block": 1, "fp8_per_tensor": 1}


@dataclass(frozen=True)
class Counts:
    total: int
    embedding: int
    """Word embeddings, and the output layer where it is separate."""
    experts: int
    active: int
    """That one token passes through, the embedding's row not counted."""

    @classmethod
    def of(cls, arch: Arch) -> Counts:
        embedding = arch.vocab * arch.hidden * (1 if arch.tied else 2)
        each = 3 * arch.hidden * arch.moe_ffn
        experts = len(arch.moe_layers) * arch.experts * each
        total = arch.parameters()
        active = total - embedding - experts + len(arch.moe_layers) * arch.experts_per_token * each + arch.vocab * arch.hidden
        return cls(total, embedding, experts, active)


@dataclass(frozen=True)
class RankCount:
    """Of one trainer rank, the vocabulary's padding included."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def of_stages(arch: Arch, layout: Layout) -> list[RankCount]:
    """Of the ranks of each pipeline stage; all ranks of a stage hold equally many."""
    found, each = [], layout.world // layout.pp
    for stage in range(layout.pp):
        shapes = parameters(arch, layout, layout.at(stage * each))
        expert = sum(prod(shape) for name, shape in shapes.items() if ".experts." in name)
        copy = arch.tied and stage == layout.pp - 1 and stage > 0  # the last stage keeps a copy of tied embeddings
        dense = sum(map(prod, shapes.values())) - expert + copy * arch.padded_vocab(layout.tp) // layout.tp * arch.hidden
        found.append(RankCount(dense, expert))
    return found


def engine_bytes(arch: Arch, table: PrecisionTable, engine: EngineLayout) -> int:
    """Weights and scales of engine rank 0, which holds as much as any."""
    cut, at, total = EngineLayout(engine.tp, engine.ep, engine.replicas), engine.at(0), 0
    for name, shape in table.shapes.items():
        if (box := wanted(name, shape, arch, cut, at)) is not None:
            held = tuple(stop - start for start, stop in box)
            format = table.formats[name]
            total += prod(held) * _WIRE_BYTES[format] + (4 * prod(grid(held)) if format == "fp8_block" else 0)
    return total
