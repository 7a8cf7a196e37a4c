"""What every transport offers: one member's end of a group of trainer ranks and engine ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from trt_rl.errors import RefitError

if TYPE_CHECKING:
    from trt_rl.refit.stream import Refit


@dataclass(frozen=True)
class Meeting:
    """Where and how the members of a refit group find each other. Trainer ranks are members `0..trainers-1`."""

    host: str
    port: int
    members: int
    trainers: int
    timeout_s: float
    generation: int = 0
    """Counts the groups of a run: after an engine left, the others meet anew."""
    folder: str = ""
    """Of the `disk` transport."""
    labels: tuple[str, ...] = ()
    """What errors call each member; by number if left out."""

    def name(self, member: int) -> str:
        if self.labels:
            return self.labels[member]
        return f"trainer rank {member}" if member < self.trainers else f"engine rank {member - self.trainers}"

    def store(self) -> dist.Store:
        timeout = timedelta(seconds=self.timeout_s)
        try:
            store = dist.TCPStore(self.host, self.port, timeout=timeout, wait_for_workers=False)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise RefitError(f"the refit's store at {self.host}:{self.port} does not answer: {error}") from error
        return dist.PrefixStore(f"refit-{self.generation}", store)


class Transfer(NamedTuple):
    """One bucket, or a message about it, to or from a peer."""

    payload: torch.Tensor
    peer: int
    bucket: int


class Exchange(ABC):
    """One round's transfers of a member, under way."""

    @abstractmethod
    def received(self) -> torch.Tensor:
        """Wait for the incoming bucket; the buffer that holds it.

        Raises:
            RefitError: the sender ended or failed; names it.
        """

    @abstractmethod
    def sent(self) -> None:
        """Wait until the outgoing buffer may be written again.

        Raises:
            PeerLost: the receiver is gone.
        """


class PeerLost(RefitError):
    """A receiver ended; the others may still be served."""


class Link(ABC):
    """Construction is collective. A member exchanges at most one bucket each way in a round, in the order of rounds."""

    device: torch.device
    overlays = False
    """Only changes arrive: the receiver fills its buffer with what it holds before each exchange."""
    sent_bytes = saved_bytes = 0

    def buffers(self, nbytes: int) -> list[torch.Tensor]:
        """Two buffers of `nbytes` to send from or to receive into.

        Raises:
            RefitError: there is not enough memory.
        """
        try:
            return [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on a CPU
            raise RefitError(f"not enough memory for two buckets of {nbytes} bytes; lower refit.bucket_mib ({error})") from error

    def begin(self, refit: Refit) -> None:  # noqa: B027  most transports have nothing to do
        """A refit starts."""

    @abstractmethod
    def exchange(self, send: Transfer | None, receive: Transfer | None) -> Exchange:
        """Start one round. The payload of `receive` is the buffer to fill."""

    def release(self, payload: torch.Tensor, sender: int) -> None:  # noqa: B027
        """The receiver is done with a payload that `received` returned."""

    def end(self) -> None:  # noqa: B027
        """This member has done its part of the refit."""

    def take_counts(self) -> tuple[int, int]:
        """Bytes sent and bytes saved since the last call."""
        counts, self.sent_bytes, self.saved_bytes = (self.sent_bytes, self.saved_bytes), 0, 0
        return counts

    @abstractmethod
    def close(self) -> None: ...
