"""A pool of real processes that run one function as a distributed job, over gloo or NCCL, again and again.

Importing megatron takes seconds; the pool pays it once. On a CPU every job has fresh processes, forked from one that has
imported everything: process groups that Megatron's hooks keep alive would leave gloo threads behind, each of which wakes a
hundred times a second, and after some hundred jobs nothing else gets a turn. Where there is CUDA, which does not
survive a fork, processes are kept.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing as mp
import tempfile
import traceback
from dataclasses import dataclass


def _next_job(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return None


def _worker(pipe) -> None:
    import torch

    if not (on_gpu := torch.cuda.is_available()):
        import tests.support.preload  # noqa: F401  done already, in a forked process
    import torch.distributed as dist
    from megatron.core import parallel_state

    while (job := _next_job(pipe)) is not None:
        function, rank, world, meeting, args = job
        try:
            module, name = function.rsplit(":", 1)
            if on_gpu:
                torch.cuda.set_device(rank)
            dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
            result = (True, getattr(importlib.import_module(module), name)(*args))
        except BaseException:  # noqa: BLE001 the parent re-raises it with this rank's traceback
            result = (False, f"rank {rank}:\n{traceback.format_exc()}")
        finally:
            with contextlib.suppress(AssertionError):
                parallel_state.destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(result)


@dataclass
class Pool:
    size: int

    def __post_init__(self) -> None:
        import torch

        self.kept = torch.cuda.is_available()
        self.context = mp.get_context("spawn" if self.kept else "forkserver")
        if not self.kept:
            self.context.set_forkserver_preload(["tests.support.preload"])
        self.members = []

    def _start(self, count: int) -> None:
        while len(self.members) < count:
            here, there = self.context.Pipe()
            process = self.context.Process(target=_worker, args=(there,))  # not a daemon: saving a checkpoint forks writers
            process.start()
            there.close()  # so that a member sees the end of the pipe when this process ends
            self.members.append((process, here))

    def run(self, world: int, function: str, *args, timeout: float = 240) -> list:
        """Results of `module:function(*args)` from every rank. Raises the first failure with its traceback."""
        meeting = tempfile.mktemp(prefix="trt_rl_test_")  # a file, because a port found free may be taken by then
        self._start(self.size if self.kept else world)
        members = self.members[:world]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((function, rank, world, meeting, args))
        try:
            results = []
            for rank, (process, pipe) in enumerate(members):
                if not pipe.poll(timeout):
                    raise TimeoutError(f"rank {rank} of {world} did not finish {function} in {timeout} s (alive: {process.is_alive()})")
                results.append(pipe.recv())
        finally:
            if not self.kept:
                self.close()
        failures = [text for ok, text in results if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def close(self) -> None:
        for _, pipe in self.members:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process, _ in self.members:
            process.join(5)
            if process.is_alive():
                process.kill()
        self.members = []
