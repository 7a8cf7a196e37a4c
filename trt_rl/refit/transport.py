"""Moving buckets between trainer ranks and engines. One transport today: gloo, over TCP, for any machine.

Trainer ranks are members `0..T-1` of a process group of their own, engines `T..T+E-1`. The group shares nothing
with torch's default group, so an engine may be an ordinary process.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from trt_rl.errors import RefitError
from trt_rl.refit.bucket import Bucket

_BUCKET, _END, _ABORT = 0, 1, 2


class GlooLink:
    """One member's end of the group, which meets at the store on `host:port`.

    Construction is collective: every member must arrive within `timeout_s`.
    """

    def __init__(self, host: str, port: int, member: int, members: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.PrefixStore("refit", dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False))
        self._group = dist.ProcessGroupGloo(self._store, member, members, timeout)

    def send(self, to: int, version: int, bucket: Bucket) -> None:
        self._message(to, _BUCKET, version, bucket.manifest(), bucket.payload.cpu())

    def end(self, to: int, version: int) -> None:
        """Tell `to` that this member has sent everything it owns."""
        self._message(to, _END, version)

    def abort(self, to: int, version: int, reason: str) -> None:
        self._message(to, _ABORT, version, reason.encode())

    def receive(self, senders: int, version: int) -> Iterator[Bucket]:
        """Buckets of all `senders`, one sender after the other.

        Raises:
            RefitError: a sender aborted, or speaks of another version. Every sender has been heard to its end by then.
        """
        failures = []
        for sender in range(senders):
            while True:
                head = self._receive(sender, torch.empty(4, dtype=torch.int64))
                kind, theirs, text_size, payload_size = head.tolist()
                text = bytes(self._receive(sender, torch.empty(text_size, dtype=torch.uint8)).numpy())
                if kind == _ABORT:
                    failures.append(text.decode())
                    break
                if theirs != version:
                    failures.append(f"trainer rank {sender} sends version {theirs}, the engine expects {version}")
                if kind == _END:
                    break
                payload = self._receive(sender, torch.empty(payload_size, dtype=torch.uint8))
                if not failures:
                    yield Bucket.from_wire(text, payload)
        if failures:
            raise RefitError("; ".join(failures))

    def _message(self, to: int, kind: int, version: int, text: bytes = b"", payload: torch.Tensor | None = None) -> None:
        size = 0 if payload is None else payload.numel()
        head = torch.tensor([kind, version, len(text), size], dtype=torch.int64)
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else None
        for tensor in (head, body, payload):
            if tensor is not None and tensor.numel():
                self._group.send([tensor], to, 0).wait()

    def _receive(self, sender: int, into: torch.Tensor) -> torch.Tensor:
        if into.numel():
            try:
                self._group.recv([into], sender, 0).wait()
            except RuntimeError as error:
                raise RefitError(f"trainer rank {sender} stopped sending: {error}") from error
        return into
