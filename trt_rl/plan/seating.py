"""Which rank sits on which GPU of which node, and which groups of ranks span nodes.

The order is the one in which `placement` fills Ray's bundles: the trainer first, node by node, then one replica
after the other where it fits best. A cluster that has other jobs may give other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.route import Placement

Seat = tuple[int, int]  # node, GPU of the node


@dataclass(frozen=True)
class Seating:
    trainer: tuple[Seat, ...]
    engine: tuple[Seat, ...]
    gpus_per_node: int

    @classmethod
    def of(cls, layout: Layout, engine: EngineLayout, gpus_per_node: int, colocated: bool) -> Seating:
        trainer = tuple(divmod(rank, gpus_per_node) for rank in range(layout.world))
        if colocated:
            return cls(trainer, trainer[: engine.world], gpus_per_node)
        nodes = -(-layout.world // gpus_per_node)
        free = {node: gpus_per_node for node in range(nodes)}
        free[nodes - 1] -= (layout.world - 1) % gpus_per_node + 1
        for node in range(nodes - 1):
            free[node] = 0
        seats: list[Seat] = []
        for _ in range(engine.replicas):
            fitting = [node for node, room in free.items() if room >= engine.tp]
            left = engine.tp
            while left:
                node = fitting[0] if fitting else len(free)
                room = free.setdefault(node, gpus_per_node)
                take = min(left, room)
                seats += [(node, gpus_per_node - room + i) for i in range(take)]
                free[node], left = room - take, left - take
        return cls(trainer, tuple(seats), gpus_per_node)

    @property
    def nodes(self) -> int:
        return 1 + max(node for node, _ in (*self.trainer, *self.engine))

    @property
    def gpus(self) -> int:
        return len({*self.trainer, *self.engine})

    def placement(self) -> Placement:
        return Placement(tuple(node for node, _ in self.trainer), tuple(node for node, _ in self.engine))

    def by_node(self) -> list[dict[str, str]]:
        """What every node holds, as ranges of ranks."""
        return [
            {
                side: _ranges([rank for rank, (its, _) in enumerate(seats) if its == node])
                for side, seats in (("trainer", self.trainer), ("engine", self.engine))
            }
            for node in range(self.nodes)
        ]

    def crossing(self, layout: Layout, engine: EngineLayout) -> dict[str, int]:
        """Name of a dimension -> nodes that one of its groups spans, for those that span several."""
        found = {}
        for name, others in (
            ("tp", ("cp", "dp", "pp")),
            ("cp", ("tp", "dp", "pp")),
            ("dp", ("tp", "cp", "pp")),
            ("pp", ("tp", "cp", "dp")),
            ("ep", ("etp", "edp", "pp")),
            ("etp", ("ep", "edp", "pp")),
        ):
            groups: dict[tuple, set[int]] = {}
            for rank, (node, _) in enumerate(self.trainer):
                at = layout.at(rank)
                groups.setdefault(tuple(getattr(at, o) for o in others), set()).add(node)
            found[f"trainer {name}"] = max(map(len, groups.values()))
        replicas: dict[int, set[int]] = {}
        for rank, (node, _) in enumerate(self.engine):
            replicas.setdefault(rank // engine.tp, set()).add(node)
        found["engine tp"] = max(map(len, replicas.values()))
        return {name: nodes for name, nodes in found.items() if nodes > 1}


def _ranges(ranks: list[int]) -> str:
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
