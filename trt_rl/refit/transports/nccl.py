"""Buckets between GPUs, of one node or many, over one NCCL group of trainer and engine ranks.

A round's send and receive are one NCCL group call, so a rank that passes buckets on uses both directions of its link.
Nothing here waits on the CPU: transfers are ordered behind quantizing and before loading by the streams. So a peer that
dies is not noticed here; the session hears of it from Ray, but NCCL's own watchdog may end the processes that wait for
the dead one. A refit over NCCL does not survive the death of an engine; one over gloo does.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from trt_rl.errors import RefitError
from trt_rl.refit.route import Route
from trt_rl.refit.transports.link import Exchange, Link, Meeting, Transfer


class NcclLink(Link):
    def __init__(self, meeting: Meeting, member: int, route: Route) -> None:
        if not torch.cuda.is_available():
            raise RefitError(f"refit.transport = nccl needs a GPU, {meeting.name(member)} sees none; use gloo")
        self.meeting, self.device = meeting, torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=meeting.timeout_s)
        store = meeting.store()
        # The wrapper that torch's own groups have, without registering this one: the process may hold other groups.
        self._group = dist.ProcessGroup(store, member, meeting.members)
        self._backend = dist.ProcessGroupNCCL(store, member, meeting.members, options)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self._group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._backend)
        # The group's communicator is made by a collective; sends and receives alone would make one for every pair.
        self._group.allreduce([torch.ones(1, device=self.device)]).wait()
        torch.cuda.synchronize(self.device)

    def exchange(self, send: Transfer | None, receive: Transfer | None) -> Exchange:
        self._group._start_coalescing(self.device)
        if receive:
            self._group.recv([receive.payload], receive.peer, 0)
        if send:
            self.sent_bytes += send.payload.numel()
            self._group.send([send.payload], send.peer, 0)
        return _NcclExchange(self._group._end_coalescing(self.device), receive)

    def close(self) -> None:
        self._backend.abort()


class _NcclExchange(Exchange):
    def __init__(self, work: dist.Work, receive: Transfer | None) -> None:
        self.work, self.receive = work, receive

    def received(self) -> torch.Tensor:
        self.work.wait()
        return self.receive.payload

    def sent(self) -> None:
        self.work.wait()  # what is enqueued next on this stream comes after
