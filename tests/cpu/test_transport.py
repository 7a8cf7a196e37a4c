"""Buckets over gloo between members in threads, and what an engine hears when a sender fails."""

from __future__ import annotations

import threading

import pytest
import ray
import torch
import torch.distributed as dist

from trt_rl.errors import RefitError
from trt_rl.refit.bucket import Bucket, BucketWriter
from trt_rl.refit.session import RefitSession
from trt_rl.refit.transport import GlooLink


def bucket(value: int, size: int = 1000) -> Bucket:
    writer = BucketWriter(1 << 20)
    list(writer.add((f"w{value}", ((0, size),), torch.full((size,), value, dtype=torch.uint8))))
    return next(writer.finish())


def exchange(*senders, timeout_s: float = 20):
    """Run each of `senders(link, engine member)` in a thread against one engine; returns what the engine got or raised."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, count = store.port, len(senders)

    def run(member: int) -> None:
        link = GlooLink("127.0.0.1", port, member, count + 1, timeout_s)
        senders[member](link, count)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    link = GlooLink("127.0.0.1", port, count, count + 1, timeout_s)
    try:
        return [entry.name for b in link.receive(count, 7) for entry, _ in b.tensors()]
    finally:
        for thread in threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a sender still waits"


def sends(*values: int, version: int = 7):
    def sender(link: GlooLink, engine: int) -> None:
        for value in values:
            link.send(engine, version, bucket(value))
        link.end(engine, version)

    return sender


def test_every_bucket_of_every_sender_arrives_in_order():
    assert exchange(sends(1, 2), sends(), sends(3)) == ["w1", "w2", "w3"]


def test_an_abort_reaches_the_engine_after_all_senders_were_heard():
    def gives_up(link: GlooLink, engine: int) -> None:
        link.send(engine, 7, bucket(1))
        link.abort(engine, 7, "trainer rank 0: w2 holds NaN")

    with pytest.raises(RefitError, match="trainer rank 0: w2 holds NaN"):
        exchange(gives_up, sends(3, 4, 5))


def test_another_version_is_refused():
    with pytest.raises(RefitError, match="trainer rank 1 sends version 6, the engine expects 7"):
        exchange(sends(1), sends(2, version=6))


def test_a_sender_that_vanishes_ends_the_wait_with_its_name():
    with pytest.raises(RefitError, match="trainer rank 1 stopped sending"):
        exchange(sends(1), lambda link, engine: link.send(engine, 7, bucket(2)), timeout_s=5)


class Party:
    """Stands for trainer group or pool: every member answers `connect` with its table's digest."""

    def __init__(self, *digests: str) -> None:
        self.actors, self.digests = list(digests), digests

    def begin(self, method: str, *args) -> list[ray.ObjectRef]:
        return [ray.put(d) for d in self.digests]


def test_sides_with_different_precision_tables_refuse_to_start():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        RefitSession(Party("aa", "aa"), Party("aa"), ["aa"], ("h", 1), 10)
        with pytest.raises(RefitError, match=r"disagree about which tensors are FP8.*trainer rank 1 aa, engine 0 bb"):
            RefitSession(Party("aa", "aa"), Party("bb"), ["bb"], ("h", 1), 10)
    finally:
        ray.shutdown()
