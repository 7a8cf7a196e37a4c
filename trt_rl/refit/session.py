"""A refit as the driver sees it: trainer ranks send, engines receive, one version, all or an error."""

from __future__ import annotations

from typing import Any, Protocol

from trt_rl.errors import RefitError
from trt_rl.processes import gather


class Party(Protocol):
    """What this module needs of the trainer group and of the rollout pool."""

    actors: list[Any]

    def begin(self, method: str, *args: Any) -> list[Any]: ...


class RefitSession:
    """Links the ranks of `trainer` with the engines of `pool`, once; then `run` moves versions."""

    def __init__(self, trainer: Party, pool: Party, engine_digests: list[str], address: tuple[str, int], timeout_s: float) -> None:
        self.trainer, self.pool, self.timeout_s = trainer, pool, timeout_s
        ranks, engines = len(trainer.actors), len(pool.actors)
        self.names = [f"trainer rank {i}" for i in range(ranks)] + [f"engine {i}" for i in range(engines)]
        joined = trainer.begin("connect", *address, engines) + pool.begin("connect", *address, ranks, ranks + engines)
        digests = gather(joined, self.names, timeout_s)[:ranks] + engine_digests
        if len(set(digests)) > 1:
            table = ", ".join(f"{name} {digest}" for name, digest in zip(self.names, digests, strict=True))
            raise RefitError(f"trainer and engine disagree about which tensors are FP8; table digests: {table}")

    def run(self, version: int) -> dict[str, float]:
        """Move the trainer's weights into every engine as `version`.

        Returns:
            `bytes` received by one engine, and `tensors` it holds.

        Raises:
            RefitError: refused or failed; engines that did not commit serve nothing until a refit does.
        """
        refs = self.pool.begin("receive_weights", version) + self.trainer.begin("send_weights", version)
        engines = len(self.pool.actors)
        names = self.names[-engines:] + self.names[:-engines]
        return gather(refs, names, self.timeout_s)[0]
