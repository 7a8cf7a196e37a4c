"""Buckets between processes that share GPUs of one node: the receiver reads the sender's buffer where it lies.

Each sender publishes CUDA IPC handles of its two buffers once, with the UUID of its GPU; receivers map them. A bucket
then costs one small message each way; one that lies on another GPU of the node is first copied to the receiver's own.
Handles travel as plain numbers and bytes through the run's store, never pickled.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta

import torch
import torch.distributed as dist

from trt_rl.errors import RefitError
from trt_rl.refit.route import Route
from trt_rl.refit.transports.link import Exchange, Link, Meeting, PeerLost, Transfer

_READY, _DONE = 1, 2


class IpcLink(Link):
    def __init__(self, meeting: Meeting, member: int, route: Route) -> None:
        if not torch.cuda.is_available():
            raise RefitError(f"refit.transport = ipc shares GPU memory, {meeting.name(member)} sees no GPU; use gloo")
        self.meeting, self.device = meeting, torch.device("cuda", torch.cuda.current_device())
        self._store = meeting.store()
        self._control = dist.ProcessGroupGloo(self._store, member, meeting.members, timedelta(seconds=meeting.timeout_s))
        self._own: list[torch.Tensor] = []
        self._telling: list[tuple[dist.Work, torch.Tensor]] = []  # with the tensors, which must live until they are sent
        self._mapped: dict[int, list[torch.Tensor]] = {}
        self._near = torch.empty(0, dtype=torch.uint8, device=self.device)  # a bucket from another GPU, copied to this one
        if member < meeting.trainers:
            self._own = super().buffers(max(route.slot_bytes(member), 1))
            self._store.set(f"ipc-{member}", json.dumps([_export(b) for b in self._own]))

    def buffers(self, nbytes: int) -> list[torch.Tensor]:
        return self._own or [torch.empty(0, dtype=torch.uint8, device=self.device)] * 2

    def exchange(self, send: Transfer | None, receive: Transfer | None) -> Exchange:
        if send:
            self.sent_bytes += send.payload.numel()
            which = next(i for i, b in enumerate(self._own) if b.data_ptr() == send.payload.data_ptr())
            torch.cuda.current_stream().synchronize()  # what the receiver is told to read is written by then
            self._tell(send.peer, _READY, which, send.payload.numel())
        return _IpcExchange(self, send, receive)

    def release(self, payload: torch.Tensor, sender: int) -> None:
        torch.cuda.current_stream().synchronize()
        self._tell(sender, _DONE, 0, 0)

    def mapped(self, sender: int, which: int) -> torch.Tensor:
        if sender not in self._mapped:
            self._mapped[sender] = [_import(b, self.meeting.name(sender)) for b in json.loads(self._store.get(f"ipc-{sender}"))]
        return self._mapped[sender][which]

    def near(self, sender: int, which: int, nbytes: int) -> torch.Tensor:
        """A sender's bucket in this member's GPU."""
        there = self.mapped(sender, which)[:nbytes]
        if there.device == self.device:
            return there
        if self._near.numel() < nbytes:
            self._near = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._near[:nbytes].copy_(there)  # the bucket before was loaded by the same stream

    def _tell(self, peer: int, kind: int, which: int, nbytes: int) -> None:
        """Send without waiting: the peer may at this moment be sending to us. A dead peer is noticed when it is heard."""
        message = torch.tensor([which, nbytes])
        try:
            self._telling.append((self._control.send([message], peer, kind), message))
        except RuntimeError as error:
            raise PeerLost(f"{self.meeting.name(peer)} does not answer: {error}") from error

    def hear(self, peer: int, kind: int, failure: type[RefitError]) -> list[int]:
        message = torch.zeros(2, dtype=torch.int64)
        try:
            self._control.recv([message], peer, kind).wait()
        except RuntimeError as error:
            raise failure(f"{self.meeting.name(peer)} does not answer: {error}") from error
        return message.tolist()

    def end(self) -> None:
        for work, _ in self._telling:
            with contextlib.suppress(RuntimeError):  # a receiver that ended was noticed when it was not heard
                work.wait()
        self._telling = []

    def close(self) -> None:
        self._mapped, self._own, self._telling = {}, [], []
        self._control = None  # sockets close, and peers hear of it, when the last reference goes; see gloo


class _IpcExchange(Exchange):
    def __init__(self, link: IpcLink, send: Transfer | None, receive: Transfer | None) -> None:
        self.link, self.send, self.receive = link, send, receive

    def received(self) -> torch.Tensor:
        which, nbytes = self.link.hear(self.receive.peer, _READY, RefitError)
        return self.link.near(self.receive.peer, which, nbytes)

    def sent(self) -> None:
        if self.send:
            self.link.hear(self.send.peer, _DONE, PeerLost)


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _export(buffer: torch.Tensor) -> dict:
    _, handle, size, offset, counter, counter_offset, event, must_sync = buffer.untyped_storage()._share_cuda_()
    return {
        "gpu": _uuid(buffer.device.index),
        "nbytes": buffer.numel(),
        "shift": buffer.storage_offset(),
        "storage": [handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), must_sync],
    }


def _import(about: dict, owner: str) -> torch.Tensor:
    found = [i for i in range(torch.cuda.device_count()) if _uuid(i) == about["gpu"]]
    if not found:
        raise RefitError(f"{about['gpu']} of {owner} is not visible here; ipc needs trainer and engine on the same GPUs of one node")
    handle, size, offset, counter, counter_offset, event, must_sync = about["storage"]
    storage = torch.UntypedStorage._new_shared_cuda(
        found[0], bytes.fromhex(handle), size, offset, bytes.fromhex(counter), counter_offset, bytes.fromhex(event), must_sync
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[about["shift"] : about["shift"] + about["nbytes"]]
