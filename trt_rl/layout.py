"""How trainer ranks are arranged: sizes of every parallel dimension and the coordinates of each rank.

Pure arithmetic, no torch. The order of dimensions is Megatron-core's default `tp-cp-ep-dp-pp`
(megatron/core/parallel_state.py, `RankGenerator`): tensor parallel ranks are neighbours, pipeline
stages are furthest apart, and experts have a decomposition of their own over the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in each dimension. `etp`, `ep` and `edp` concern expert weights only."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a trainer. World size is `tp * pp * cp * dp`; experts divide the same ranks by `etp * ep`."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.world // (self.pp * self.etp * self.ep)

    def violations(self) -> list[str]:
        stage = self.tp * self.cp * self.dp
        if stage % (self.etp * self.ep):
            return [
                f"trainer.parallel: ep*etp = {self.ep}*{self.etp} must divide the {stage} ranks of a pipeline stage "
                f"(tp*cp*dp = {self.tp}*{self.cp}*{self.dp}); set dp to a multiple of "
                f"{smallest_multiple(self.tp * self.cp, self.etp * self.ep)}, or lower ep or etp"
            ]
        return []

    def at(self, rank: int) -> Coordinates:
        """Coordinates of `rank`.

        Raises:
            IndexError: `rank` is not in `range(world)`.
        """
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside a world of {self.world}")
        stage, within = divmod(rank, self.world // self.pp)
        return Coordinates(
            rank=rank,
            tp=within % self.tp,
            cp=within // self.tp % self.cp,
            dp=within // (self.tp * self.cp),
            pp=stage,
            etp=within % self.etp,
            ep=within // self.etp % self.ep,
            edp=within // (self.etp * self.ep),
        )

    def layers(self, pp_rank: int, total: int) -> range:
        """Global layer numbers held by pipeline stage `pp_rank` when `total` layers are split evenly."""
        each = total // self.pp
        return range(pp_rank * each, (pp_rank + 1) * each)

    def __str__(self) -> str:
        parts = [f"{name.upper()}{size}" for name, size in vars(self).items() if size > 1 and (name, size) != ("etp", self.tp)]
        return "x".join(parts) or "single rank"


@dataclass(frozen=True)
class EngineShard:
    """Where one engine rank stands: its replica, and its parts of attention and dense layers (`tp`) and of experts."""

    rank: int
    replica: int
    tp: int
    ep: int
    moe_tp: int


@dataclass(frozen=True)
class EngineLayout:
    """Parallel sizes of rollout engines. A replica has `tp` ranks; within them experts are split `ep` ways, and each
    expert `tp // ep` ways (vLLM's `enable_expert_parallel` is `ep == tp`; TensorRT-LLM's `moe_expert_parallel_size`)."""

    tp: int = 1
    ep: int = 1
    replicas: int = 1
    whole: bool = False
    """Every rank takes whole tensors and cuts them itself, as TensorRT-LLM's loader does."""

    @property
    def world(self) -> int:
        return self.tp * self.replicas

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    def violations(self) -> list[str]:
        if self.tp % self.ep:
            works = ", ".join(map(str, divisors(self.tp)))
            return [f"rollout.parallel.ep = {self.ep} does not divide rollout.parallel.tp = {self.tp}; works: {works}"]
        return []

    def at(self, rank: int) -> EngineShard:
        """Raises:
        IndexError: `rank` is not in `range(world)`.
        """
        if not 0 <= rank < self.world:
            raise IndexError(f"engine rank {rank} is outside a world of {self.world}")
        replica, tp = divmod(rank, self.tp)
        # The order of TensorRT-LLM's Mapping: neighbours hold different experts (tensorrt_llm/mapping.py).
        return EngineShard(rank=rank, replica=replica, tp=tp, ep=tp % self.ep, moe_tp=tp // self.ep)

    def __str__(self) -> str:
        parts = [f"{name.upper()}{size}" for name, size in (("tp", self.tp), ("ep", self.ep)) if size > 1]
        return ("x".join(parts) or "one rank") + (f", {self.replicas} replicas" if self.replicas > 1 else "")


def smallest_multiple(step: int, target: int) -> int:
    """The smallest n >= 1 for which `n * step` is a multiple of `target`."""
    n = 1
    while n * step % target:
        n += 1
    return n


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
