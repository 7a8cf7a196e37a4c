"""Buckets over TCP between CPUs. A bucket on a GPU is copied through host memory: for machines without NCCL."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from trt_rl.errors import RefitError
from trt_rl.refit.route import Route
from trt_rl.refit.transports.link import Exchange, Link, Meeting, PeerLost, Transfer


class GlooLink(Link):
    """A gloo process group of its own: it shares nothing with torch's default group."""

    def __init__(self, meeting: Meeting, member: int, route: Route) -> None:
        self.meeting, self.device = meeting, torch.device("cpu")
        self._exchanges: weakref.WeakSet[_GlooExchange] = weakref.WeakSet()
        try:
            self._group = dist.ProcessGroupGloo(meeting.store(), member, meeting.members, timedelta(seconds=meeting.timeout_s))
        except RuntimeError as error:
            raise RefitError(f"{meeting.name(member)} could not join the refit group of {meeting.members}: {error}") from error

    def exchange(self, send: Transfer | None, receive: Transfer | None) -> Exchange:
        self.sent_bytes += send.payload.numel() if send else 0
        exchange = _GlooExchange(self, send, receive)
        self._exchanges.add(exchange)
        return exchange

    def close(self) -> None:
        # Neither shutdown() nor abort() closes sockets. They close, and peers hear of it, when the last reference goes.
        for exchange in self._exchanges:
            exchange.forget()
        self._group = None


class _GlooExchange(Exchange):
    def __init__(self, link: GlooLink, send: Transfer | None, receive: Transfer | None) -> None:
        self.link, self.send, self.receive = link, send, receive
        self._work = {}
        for kind, transfer in (("recv", receive), ("send", send)):
            if transfer is not None:
                try:
                    self._work[kind] = getattr(link._group, kind)([transfer.payload], transfer.peer, 0)
                except RuntimeError as error:  # raised again by whoever waits for it
                    self._work[kind] = error

    def received(self) -> torch.Tensor:
        self._wait("recv", RefitError, f"{self.link.meeting.name(self.receive.peer)} stopped sending")
        return self.receive.payload

    def sent(self) -> None:
        if self.send:
            self._wait("send", PeerLost, f"{self.link.meeting.name(self.send.peer)} stopped receiving")

    def _wait(self, kind: str, failure: type[RefitError], text: str) -> None:
        work = self._work.pop(kind)
        try:
            if isinstance(work, RuntimeError):
                raise work
            work.wait()
        except RuntimeError as error:
            raise failure(f"{text}: {error}") from error
        finally:
            del work  # a traceback that keeps this frame would keep the sockets open

    def forget(self) -> None:
        """Drop the group's pending operations, which keep it alive."""
        self._work.clear()
