"""The driver's handle on all trainer ranks: one Ray actor each, called together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist

from trt_rl.batch import Batch
from trt_rl.config import Recipe
from trt_rl.errors import RefitError
from trt_rl.placement import Places
from trt_rl.processes import gather


class MegatronActor:
    """A Ray actor around one `MegatronRank`; the import order below is why they are two classes."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe, self.rank = recipe, rank

    def listen(self) -> tuple[str, int]:
        """Open the store at which all members of this run meet, on a port that is free because it is taken here."""
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return ray.util.get_node_ip_address(), self.store.port

    def start(self, host: str, port: int) -> None:
        """Join the default process group and build the model. Collective over all ranks."""
        if self.rank:
            self.store = dist.TCPStore(host, port, wait_for_workers=False)
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)  # Ray shows each actor one GPU
        else:
            from trt_rl.trainer import cpu

            torch.set_num_threads(1)
            cpu.install()
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("trainer", self.store),
            rank=self.rank,
            world_size=self.recipe.trainer.parallel.layout().world,
        )
        import modelopt.torch.quantization.qtensor  # noqa: F401  takes seconds: better now than inside the first refit

        from trt_rl.trainer.rank import MegatronRank

        self.trainer = MegatronRank(self.recipe)

    def gpu(self) -> str:
        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def do(self, method: str, *args: Any) -> Any:
        return getattr(self.trainer, method)(*args)


@dataclass
class TrainerGroup:
    """All ranks of the trainer. Every method returns when every rank has finished."""

    recipe: Recipe
    actors: list[ray.actor.ActorHandle]
    address: tuple[str, int] | None = None
    """Of the store at which processes of this run meet; known once `build` has begun."""

    @classmethod
    def start(cls, recipe: Recipe, places: Places) -> TrainerGroup:
        actor, ranks = ray.remote(MegatronActor), range(recipe.trainer.parallel.layout().world)
        return cls(recipe, [actor.options(name=f"trainer-{r}", **places.trainer_options(r)).remote(recipe, r) for r in ranks])

    def build(self) -> None:
        """Bring up process groups and load the model. Ranks start together, so call it once all actors exist."""
        self.address = self._wait([self.actors[0].listen.remote()])[0]
        self._wait([actor.start.remote(*self.address) for actor in self.actors])

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Log-probs `[N, S]` under the current weights, FP32, zero outside the mask."""
        return assemble(batch, self._all("logprobs", ray.put(batch)))

    def train(self, batch: Batch) -> dict[str, float]:
        """One step's updates; metrics from the reporting rank."""
        return next(m for m in self._all("train", ray.put(batch)) if m)

    def begin(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Start `method` on every rank without waiting."""
        return [actor.do.remote(method, *args) for actor in self.actors]

    def gpus(self) -> list[str]:
        """GPU of every rank, as its node numbers it; empty without GPUs."""
        return self._wait([actor.gpu.remote() for actor in self.actors])

    def calibrate(self, batch: Batch) -> dict[str, float]:
        """Calibrate activations for fp8_per_tensor on every rank; the input scales, the same on all."""
        return self._all("calibrate", ray.put(batch))[0]

    def set_input_scales(self, scales: dict[str, float]) -> None:
        self._all("set_input_scales", scales)

    def begin_refit(self, step: str, *args: Any, only: list[int] | None = None) -> list[ray.ObjectRef]:
        """Start one step of a refit on every rank without waiting; see `refit.session`."""
        return self.begin(f"refit_{step}", *args)

    def save(self, folder: str) -> None:
        self._all("save", folder)

    def load(self, folder: str) -> None:
        self._all("load", folder)

    def export_hf(self, folder: str) -> None:
        self._all("export_hf", folder)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._wait(self.begin(method, *args))

    def _wait(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return gather(refs, [f"trainer rank {i}" for i in range(len(refs))], self.recipe.run.wait_s)


def assemble(batch: Batch, parts: list[list[tuple[list[int], torch.Tensor]]]) -> torch.Tensor:
    """Put every rank's rows back into `[N, S]`.

    Raises:
        RefitError: a row is missing, which means that ranks disagree about the plan.
    """
    whole = torch.zeros_like(batch.engine_logp_N_S)
    seen: set[int] = set()
    for rows, logp in (piece for part in parts for piece in part):
        whole[rows] = logp
        seen.update(rows)
    if len(seen) != len(batch):
        raise RefitError(f"trainer ranks returned log-probs of {len(seen)} of {len(batch)} samples")
    return whole
