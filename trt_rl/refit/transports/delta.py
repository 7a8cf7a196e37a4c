"""Send only what changed: a wrapper around a link that compares grains of a bucket with those of the refit before.

Each bucket travels in two messages. The notice has a fixed size and says which grains follow. The body has the changed
grains one after the other, and always those with the bucket's digests and header: the receiver keeps slices, not
buckets. It overlays them on what it holds; digests cover whole slices, so the result is verified as any other refit's.
"""

from __future__ import annotations

import torch

from trt_rl.refit.digest import grain_digests
from trt_rl.refit.route import Route
from trt_rl.refit.transports.link import Exchange, Link, Transfer

GRAIN = 1024  # bytes that are compared and sent together


class DeltaLink(Link):
    overlays = True

    def __init__(self, inner: Link, route: Route) -> None:
        self.inner, self.route, self.device = inner, route, inner.device
        self._before: dict[int, torch.Tensor] = {}  # grain digests of what was sent last, by bucket
        self._packed: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._full = True

    def buffers(self, nbytes: int) -> list[torch.Tensor]:
        return self.inner.buffers(nbytes)

    def begin(self, refit) -> None:
        self._full, self._packed = refit.full, None
        self.inner.begin(refit)

    def exchange(self, send: Transfer | None, receive: Transfer | None) -> Exchange:
        notice = body = incoming = None
        if send:
            packed = self._pack(send)
            notice, body = (Transfer(part, send.peer, send.bucket) for part in packed)
        if receive:
            size = 1 + _grains(receive.payload)
            incoming = Transfer(torch.empty(size, dtype=torch.uint8, device=self.device), receive.peer, receive.bucket)
        return _DeltaExchange(self, self.inner.exchange(notice, incoming), body, receive)

    def _pack(self, send: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        if self._packed and self._packed[0] == send.bucket:  # the same bucket to another node
            return self._packed[1]
        size, grains = send.payload.numel(), _grains(send.payload)
        padded = torch.zeros(grains * GRAIN, dtype=torch.uint8)
        padded[:size] = send.payload.cpu()
        plan = self.route.buckets[send.bucket]
        ends = [part.offset for part in plan.slices[1:]] + [plan.data_bytes]
        for part, end in zip(plan.slices, ends, strict=True):  # what lies between slices is left over from other buckets
            padded[part.offset + part.nbytes : end] = 0
        digests = grain_digests(padded, GRAIN)
        before = None if self._full else self._before.get(send.bucket)
        changed = torch.ones(grains, dtype=torch.bool) if before is None else digests != before
        changed[plan.data_bytes // GRAIN :] = True
        self._before[send.bucket] = digests
        notice = torch.cat([torch.tensor([int(changed.any())], dtype=torch.uint8), changed.to(torch.uint8)])
        body = padded.view(-1, GRAIN)[changed].flatten()
        self.sent_bytes += notice.numel() + body.numel()
        self.saved_bytes += max(0, size - notice.numel() - body.numel())
        self._packed = (send.bucket, (notice.to(self.device), body.to(self.device)))
        return self._packed[1]

    def end(self) -> None:
        self.inner.end()

    def take_counts(self) -> tuple[int, int]:
        self.inner.take_counts()
        return super().take_counts()

    def close(self) -> None:
        self.inner.close()


class _DeltaExchange(Exchange):
    """Waits for the notice at once, since only it tells how much more comes."""

    def __init__(self, link: DeltaLink, notices: Exchange, body: Transfer | None, receive: Transfer | None) -> None:
        self.notices, self.receive, self.bodies, arriving = notices, receive, None, None
        if receive:
            self.changed = notices.received()[1:].bool()
            self.incoming = torch.empty(int(self.changed.sum()) * GRAIN, dtype=torch.uint8, device=link.device)
            arriving = receive._replace(payload=self.incoming) if self.incoming.numel() else None
        leaving = body if body and body.payload.numel() else None
        if leaving or arriving:
            self.bodies = link.inner.exchange(leaving, arriving)

    def received(self) -> torch.Tensor:
        payload = self.receive.payload
        if self.incoming.numel():
            self.bodies.received()
            whole = torch.zeros(self.changed.numel() * GRAIN, dtype=torch.uint8, device=payload.device)
            whole[: payload.numel()] = payload
            whole.view(-1, GRAIN)[self.changed] = self.incoming.view(-1, GRAIN)
            payload.copy_(whole[: payload.numel()])
        return payload

    def sent(self) -> None:
        self.notices.sent()
        if self.bodies:
            self.bodies.sent()


def _grains(payload: torch.Tensor) -> int:
    return -(-payload.numel() // GRAIN)
