"""Processes of a refit benchmark: trainer ranks with random Megatron-shaped weights, engine ranks with plain tensors.

No Megatron and no engine: what is measured is the refit itself, on weights of the real shapes in the real layouts.
"""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trt_rl.arch import Arch
from trt_rl.bench.baseline import Baseline
from trt_rl.errors import WorkerFailed
from trt_rl.layout import EngineLayout, Layout
from trt_rl.refit.hf_files import HFFolder
from trt_rl.refit.landing import allocate
from trt_rl.refit.member import Agreement, EngineMember, TrainerMember
from trt_rl.refit.names import hf_pieces, parameters, slices
from trt_rl.refit.precision import PrecisionTable
from trt_rl.refit.slot import Slot
from trt_rl.refit.stream import Arrival, Receiver, Refit, Sender
from trt_rl.refit.transports.link import Transfer
from trt_rl.trainer.cpu import install_without_cuda


@dataclass(frozen=True)
class Setup:
    """What every process of one benchmark knows."""

    arch: Arch
    table: PrecisionTable
    layout: Layout
    engine: EngineLayout
    store: tuple[str, int]
    device: str
    colocated: bool = False
    """Engine rank i lives on the GPU of trainer rank i."""
    engines_outside: bool = False
    """Engine ranks are processes of someone else (vLLM's workers)."""
    checkpoint: str = ""
    """Hugging Face folder with the trainer's weights; random ones if left out."""

    @property
    def world(self) -> int:
        return self.layout.world + (0 if self.engines_outside else self.engine.world)


class Party:
    """One process. Methods are called by name from the parent, on all processes at once unless it says otherwise."""

    def __init__(self, setup: Setup, index: int) -> None:
        self.setup, self.index, self.is_trainer = setup, index, index < setup.layout.world
        cuda = setup.device == "cuda"
        if cuda:
            gpu = index % setup.layout.world if setup.colocated else index
            torch.cuda.set_device(gpu)
            self.device = torch.device("cuda", gpu)
        else:
            torch.set_num_threads(1)
            self.device = torch.device("cpu")
            install_without_cuda()  # ModelOpt imports megatron
        dist.init_process_group(
            "nccl" if cuda and not setup.colocated else "gloo",
            store=dist.PrefixStore("bench", dist.TCPStore(*setup.store, wait_for_workers=False)),
            rank=index,
            world_size=setup.world,
        )
        self.trainers = dist.new_group(range(setup.layout.world))
        self.tp_group = self._cut_group(setup.layout.tp)
        self.etp_group = self._cut_group(setup.layout.etp)
        if self.is_trainer:
            self._make_weights()
        else:
            self.landings = allocate(setup.arch, setup.table, setup.engine, index - setup.layout.world, self.device)

    def _cut_group(self, size: int) -> dist.ProcessGroup | None:
        mine = None
        for start in range(0, self.setup.layout.world, size):
            group = dist.new_group(range(start, start + size))
            if start <= self.index < start + size:
                mine = group
        return mine if size > 1 else None

    def _make_weights(self) -> None:
        shapes = parameters(self.setup.arch, self.setup.layout, self.setup.layout.at(self.index))
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        flat = torch.empty(sum(sizes.values()), dtype=torch.bfloat16, device=self.device)
        at, generator = self.setup.layout.at(self.index), torch.Generator(self.device)
        files = HFFolder(self.setup.checkpoint, self.setup.arch) if self.setup.checkpoint else None
        self.weights, start = {}, 0
        for name, shape in shapes.items():
            part = flat[start : start + sizes[name]].view(shape)
            self.weights[name], start = part, start + sizes[name]
            if self.setup.checkpoint:
                part.zero_()
                for piece in hf_pieces(name, self.setup.arch, self.setup.layout, at):
                    part[slices(piece.local_box)] = files.read(piece.hf_name, piece.hf_box).to(part)
                continue
            # Ranks that hold the same values must draw the same values.
            shard = (at.etp, at.ep) if ".experts." in name else (at.tp,)
            whole = len(shape) == 1 or "router" in name
            generator.manual_seed(zlib.crc32(f"{name} {at.pp} {() if whole else shard}".encode()))
            part.normal_(0.0, 0.02, generator=generator)

    # --- our refit ---------------------------------------------------------------------------------------------

    def agree(self, agreement: Agreement) -> str:
        setup = self.setup
        if self.is_trainer:
            scales = dict.fromkeys(setup.table.formats, 1.0)
            groups = self.tp_group, self.etp_group
            self.member = TrainerMember(agreement, setup.arch, setup.table, self.index, self.weights.items(), *groups, scales)
        else:
            self.member = EngineMember(agreement, setup.arch, setup.table, self.landings)
        return self.member.digest

    def join(self) -> None:
        self.member.join()

    def check(self) -> dict[str, float]:
        return self._timed("check", self.member.check) if self.is_trainer else {}

    def prepare(self) -> dict[str, float]:
        return self._timed("prepare", self.member.prepare)

    def move(self, refit: Refit) -> dict[str, Any]:
        report = self.member.send(refit) if self.is_trainer else self.member.receive(refit)
        self._synchronize()
        return report.as_dict()

    def move_nothing_but_bytes(self, refit: Refit) -> dict[str, Any]:
        """The same transfers without quantizing or loading: the wire alone."""
        member = self.member
        kind, work = (Sender, _Idle()) if self.is_trainer else (Receiver, _Idle())
        loop = kind(member.route, member.link_member, member.link, work)
        loop.prepare()
        self._synchronize()
        started = time.perf_counter()
        report = loop.send(refit) if self.is_trainer else loop.receive(refit)
        self._synchronize()
        return report.as_dict() | {"seconds": {"wire": time.perf_counter() - started}}

    def quantize_only(self, refit: Refit) -> dict[str, float]:
        """Fill every bucket of this rank, send none; seconds, and bytes read and written."""
        if not self.is_trainer:
            return {}
        member, plans = self.member, self.member.route.sent_by(self.index)
        buffer = torch.empty(max(p.nbytes for p in plans), dtype=torch.uint8, device=self.device)

        def fill() -> None:
            for plan in plans:
                member.source.fill(Slot(plan, buffer), refit.verify != "off")

        fill()
        seconds = self._timed("quantize", fill)["quantize"]
        written = sum(p.data_bytes for p in plans)
        read = sum(2 * part.nbytes if part.dtype == "float8_e4m3fn" else part.nbytes for p in plans for part in p.slices)
        return {"seconds": seconds, "gb_per_s": (read + written) / seconds / 1e9}

    def forget_member(self) -> None:
        self.member.close()
        self.member = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- yardsticks and baseline -------------------------------------------------------------------------------

    def link_bandwidth(self, nbytes: int, repeats: int) -> float | None:
        """GB/s from trainer rank 0 to engine rank 0 through the member's own link; on the engine only."""
        target, link = self.setup.layout.world, self.member.link
        if self.index not in (0, target):
            return None
        payload, peer = torch.zeros(nbytes, dtype=torch.uint8, device=link.device), target if self.index == 0 else 0

        def move(count: int) -> None:
            for _ in range(count):
                transfer = Transfer(payload, peer, 0)
                if self.index == 0:
                    link.exchange(transfer, None).sent()
                else:
                    link.exchange(None, transfer).received()
            self._synchronize()

        move(2)
        seconds = self._timed("link", lambda: move(repeats))["link"]
        link.take_counts()
        return nbytes * repeats / seconds / 1e9 if self.index else None

    def copy_bandwidth(self) -> float | None:
        """GB/s of a device-to-device copy, read and write counted; on trainer rank 0 only."""
        if self.index:
            return None
        size = 1 << (31 if self.device.type == "cuda" else 27)
        a, b = torch.empty(2, size, dtype=torch.uint8, device=self.device)
        b.copy_(a)
        repeats = 10
        seconds = self._timed("copy", lambda: [b.copy_(a) for _ in range(repeats)])["copy"]
        return 2 * size * repeats / seconds / 1e9

    def modelopt_bandwidth(self) -> float | None:
        """GB/s (BF16 read, FP8 written) of ModelOpt's own quantization of one 4096 x 12288 matrix."""
        if not self.is_trainer:
            return None
        from trt_rl.refit.quantize import quantize_blocks

        weight = torch.randn(4096, 12288, device=self.device).bfloat16()
        box = ((0, 4096), (0, 12288))
        quantize_blocks(box, weight)
        repeats = 5
        seconds = self._timed("modelopt", lambda: [quantize_blocks(box, weight) for _ in range(repeats)])["modelopt"]
        return 3 * weight.numel() * repeats / seconds / 1e9

    def run_baseline(self) -> dict[str, float]:
        """All-gather to full BF16, broadcast, quantize at the receiver, engine's loader; see `bench.baseline`."""
        plain = Baseline(self.setup.arch, self.setup.layout, self.setup.table)
        dist.barrier()
        started, sent = time.perf_counter(), 0
        if self.is_trainer:
            sent = plain.send(self.index, self.weights, self.trainers, self.device)
        else:
            plain.receive(self.landings, self.device)
        self._synchronize()
        return {"seconds": time.perf_counter() - started, "bytes": sent}

    def snapshot(self) -> int:
        """A checksum of everything that the engine holds; 0 on trainer ranks."""
        if self.is_trainer:
            return 0
        total = 0
        for i, (_, place) in enumerate(sorted(self.landings.places.items())):
            total += (i + 1) * int(place.view.contiguous().view(torch.uint8).sum(dtype=torch.int64))
        return total

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _timed(self, name: str, function) -> dict[str, float]:
        self._synchronize()
        started = time.perf_counter()
        function()
        self._synchronize()
        return {name: time.perf_counter() - started}


class _Idle:
    """Neither fills nor loads."""

    label = "engine"

    def fill(self, slot: Slot, with_digests: bool) -> None:
        pass

    def fetch(self, slot: Slot) -> None:
        pass

    def load(self, slot: Slot, verify: bool) -> None:
        pass

    def arrivals(self) -> list[Arrival]:
        return []


def _serve(pipe, setup: Setup, index: int) -> None:
    party = None
    while (call := pipe.recv()) is not None:
        name, args = call
        try:
            if name == "start":
                party, result = Party(setup, index), None
            else:
                result = getattr(party, name)(*args)
            pipe.send((True, result))
        except BaseException:  # noqa: BLE001  the parent raises it with this traceback
            pipe.send((False, traceback.format_exc()))


class Parties:
    """All processes of a benchmark, called together. A context: leaving ends them."""

    def __init__(self, setup: Setup, wait_s: float = 300.0) -> None:
        self.setup, self.wait_s = setup, wait_s
        self.members: list[tuple[Any, Any]] = []

    def __enter__(self) -> Parties:
        context = mp.get_context("spawn")
        for index in range(self.setup.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self.setup, index), daemon=True)
            process.start()
            self.members.append((process, here))
        try:
            self.call("start")
        except BaseException:
            self.__exit__()  # processes that hold a GPU must not outlive a failed start
            raise
        return self

    def begin(self, name: str, *args: Any) -> None:
        for _, pipe in self.members:
            pipe.send((name, args))

    def finish(self, name: str) -> list[Any]:
        results = []
        for index, (process, pipe) in enumerate(self.members):
            if not pipe.poll(self.wait_s):
                raise WorkerFailed(f"process {index} did not finish {name} within {self.wait_s:.0f} s (alive: {process.is_alive()})")
            results.append(pipe.recv())
        failures = [text for ok, text in results if not ok]
        if failures:
            raise WorkerFailed(f"{name} failed:\n{failures[0]}")
        return [value for _, value in results]

    def call(self, name: str, *args: Any) -> list[Any]:
        self.begin(name, *args)
        return self.finish(name)

    def __exit__(self, *_: Any) -> None:
        for process, pipe in self.members:
            if process.is_alive():
                pipe.send(None)
        for process, _ in self.members:
            process.join(5)
            if process.is_alive():
                process.kill()
