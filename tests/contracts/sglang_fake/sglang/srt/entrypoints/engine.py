"""`Engine`: scheduler processes, and the tokenizer manager here. Its methods block a loop; the manager's are coroutines."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing as mp
from typing import Any

from sglang.srt.managers import io_struct as io
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs


class Engine:
    def __init__(self, **kwargs: Any) -> None:
        self.server_args = ServerArgs(**kwargs)
        self.tokenizer_manager = None
        atexit.register(self.shutdown)
        context, pipes, self._processes = mp.get_context("spawn"), [], []
        barrier = context.Barrier(self.server_args.tp_size)
        for rank in range(self.server_args.tp_size):
            here, there = context.Pipe()
            process = context.Process(target=run_scheduler_process, args=(self.server_args, rank, there, barrier), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            self._processes.append(process)
        for rank, (pipe, process) in enumerate(zip(pipes, self._processes, strict=True)):
            try:
                while not pipe.poll(1.0):
                    if not process.is_alive():
                        raise EOFError
                info = pipe.recv()
            except EOFError as error:
                process.join(10)
                raise RuntimeError(f"Rank {rank} scheduler died during initialization (exit code: {process.exitcode}).") from error
        self.tokenizer_manager = TokenizerManager(self.server_args, pipes)
        self.tokenizer_manager.max_req_input_len = info["max_req_input_len"]
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            self.loop = asyncio.new_event_loop()

    def get_all_child_pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def flush_cache(self) -> io.FlushCacheReqOutput:
        return self.loop.run_until_complete(self.tokenizer_manager.flush_cache())

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self.loop.run_until_complete(self.tokenizer_manager.release_memory_occupation(io.ReleaseMemoryOccupationReqInput(tags=tags), None))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self.loop.run_until_complete(self.tokenizer_manager.resume_memory_occupation(io.ResumeMemoryOccupationReqInput(tags=tags), None))

    def shutdown(self) -> None:
        """There: every child of this process. Here: the schedulers, since tests have other children."""
        for process in self._processes:
            process.kill()
            process.join(10)
