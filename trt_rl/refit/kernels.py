"""The GPU's way to fill, load and digest buckets: a few Triton launches a bucket, whatever the number of tensors in it.

Parameters and live tensors keep their addresses, so what a bucket consists of is written into tables once and used at
every refit. Bits are those of `quantize` (ModelOpt's arithmetic) and `digest`; `tests/gpu` compares them.

A table has one row of int64 a slice; programs find their slice through an index from program to row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl

from trt_rl.errors import RefitError
from trt_rl.refit.digest import GOLDEN, MULTIPLY_1, MULTIPLY_2
from trt_rl.refit.landing import Landings
from trt_rl.refit.precision import input_scale, per_tensor_scale, scale_name
from trt_rl.refit.quantize import SMALLEST_SCALE
from trt_rl.refit.route import BucketPlan, Slice
from trt_rl.refit.slot import Slot
from trt_rl.refit.source import ShardSource
from trt_rl.refit.stream import Arrival

_COPY_WORDS = tl.constexpr(4096)  # of 4 or 8 bytes, a program
_DIGEST_WORDS = tl.constexpr(4096)  # of 8 bytes, a program
_G, _M1, _M2 = tl.constexpr(GOLDEN), tl.constexpr(MULTIPLY_1), tl.constexpr(MULTIPLY_2)
QUANTIZE_OPTIONS = {"num_warps": 8, "maxnreg": 128}
_TINY = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _quantize(index, first, table, origin, slot, EVEN: tl.constexpr, SCALE: tl.constexpr):
    """One 128x128 block: read its values once, write e4m3 and its scale.

    origin: any parameter of the type that the table's have; addresses are relative to it, because the compiler knows how
        a pointer that is an argument is aligned, and would move single values otherwise.
    EVEN: every block is whole and every address and stride a multiple of 16, so that memory moves in words of 16 bytes.
    SCALE: "own" maximum of the block, "shared" (exchanged with other ranks), or "fixed" (one scale for the tensor).
    """
    program = tl.program_id(0)
    which = tl.load(index + program)
    row = table + which * 15
    block = (program - tl.load(first + which)).to(tl.int32)
    address, stride = tl.load(row), tl.load(row + 1).to(tl.int32)
    rows, columns = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    row_shift, column_shift = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    target, wide = tl.load(row + 6), tl.load(row + 7).to(tl.int32)
    scale_at, scale_row, scale_column, scale_stride = tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11)
    maxima, maxima_stride, fixed = tl.load(row + 12), tl.load(row + 13), tl.load(row + 14)
    block_row, block_column = block // wide, block % wide
    # Offsets inside the block fit 32 bits; the block's own corner does not.
    top, left = block_row * 128 - row_shift, block_column * 128 - column_shift
    r, c = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    if EVEN:
        stride, columns, mask = tl.multiple_of(stride, 16), tl.multiple_of(columns, 16), None
    else:
        mask = (top + r >= 0) & (top + r < rows) & (left + c >= 0) & (left + c < columns)
    corner = address + top.to(tl.int64) * stride + left
    if EVEN:
        corner = tl.multiple_of(corner, 16)
    x = tl.load(origin + corner + (r * stride + c), mask=mask, other=None if EVEN else 0.0).to(tl.float32)
    if SCALE == "fixed":
        scale = tl.load(fixed.to(tl.pointer_type(tl.float32)))
    else:
        if SCALE == "shared":
            amax = tl.load(maxima.to(tl.pointer_type(tl.float32)) + block_row * maxima_stride + block_column)
        else:
            amax = tl.max(tl.abs(x).reshape(16384), axis=0)
        scale = tl.div_rn(amax, tl.full([], 448.0, tl.float32))
        scale = tl.where(scale < _TINY, 1.0, scale)
        if (scale_at >= 0) & (block_row >= scale_row) & (block_column >= scale_column):
            out = (slot + scale_at).to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(out + (block_row - scale_row) * scale_stride + block_column - scale_column, scale)
    # x / scale, correctly rounded, without a division for every value: with the correctly rounded reciprocal, one
    # exact remainder mends the product (Markstein, "Computation of elementary functions on the IBM RISC System/6000
    # processor", 1990). A power of two first keeps the remainder of small blocks out of the denormals.
    lift = tl.where(scale < 1e-20, 18446744073709551616.0, 1.0).to(tl.float32)
    divisor = scale * lift
    reciprocal = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
    x = x * lift
    quotient = x * reciprocal
    remainder = tl.fma(-quotient, tl.zeros_like(x) + divisor, x)
    mended = tl.fma(remainder, tl.zeros_like(x) + reciprocal, quotient)
    values = tl.where(quotient == 0.0, quotient, mended).to(tl.float8e4nv)  # mending would turn -0 into +0
    corner = target + top.to(tl.int64) * columns + left
    if EVEN:
        corner = tl.multiple_of(corner, 16)
    tl.store(slot.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + corner + (r * columns + c), values, mask=mask)


@triton.jit
def _copy(index, first, table, source_base, target_base, EIGHT: tl.constexpr):
    """Rows of bytes from one strided place to another."""
    program = tl.program_id(0)
    which = tl.load(index + program)
    row = table + which * 6
    unit: tl.constexpr = 8 if EIGHT else 4
    kind: tl.constexpr = tl.int64 if EIGHT else tl.int32
    source = (source_base + tl.load(row)).to(tl.pointer_type(kind))
    source_stride = tl.load(row + 1) // unit
    target = (target_base + tl.load(row + 2)).to(tl.pointer_type(kind))
    target_stride, width, words = tl.load(row + 3) // unit, (tl.load(row + 4) // unit).to(tl.int32), (tl.load(row + 5) // unit).to(tl.int32)
    start = ((program - tl.load(first + which)) * _COPY_WORDS).to(tl.int32)
    for step in tl.static_range(0, 4096, 1024):
        i = start + step + tl.arange(0, 1024)
        mask = i < words
        at, column = i // width, i % width
        tl.store(target + at * target_stride + column, tl.load(source + at * source_stride + column, mask=mask), mask=mask)


@triton.jit
def _digest(index, first, table, base, out, EIGHT: tl.constexpr):
    """Add the mixed 64-bit words of a slice, wherever its rows lie, into its digest."""
    program = tl.program_id(0)
    which = tl.load(index + program)
    row = table + which * 5
    address, stride, width = base + tl.load(row), tl.load(row + 1), tl.load(row + 2)
    nbytes, position = tl.load(row + 3), tl.load(row + 4)
    start = ((program - tl.load(first + which)) * _DIGEST_WORDS).to(tl.int32)
    total = tl.zeros([1024], dtype=tl.uint64)
    for step in tl.static_range(0, 4096, 1024):
        i = start + step + tl.arange(0, 1024)
        mask = i < (nbytes + 7) // 8  # not i * 8: that leaves 32 bits
        if EIGHT:
            w = (width // 8).to(tl.int32)
            place = address.to(tl.pointer_type(tl.uint64)) + (i // w) * (stride // 8) + i % w
            word = tl.load(place, mask=mask, other=0)
        else:
            w = (width // 4).to(tl.int32)
            base4 = address.to(tl.pointer_type(tl.uint32))
            low, high = 2 * i.to(tl.int64), 2 * i.to(tl.int64) + 1
            a = tl.load(base4 + (low // w) * (stride // 4) + low % w, mask=mask, other=0).to(tl.uint64)
            b = tl.load(base4 + (high // w) * (stride // 4) + high % w, mask=mask & (high < nbytes // 4), other=0).to(tl.uint64)
            word = a | (b << 32)
        x = word + (i + 1).to(tl.uint64) * _G
        x ^= x >> 30
        x *= _M1
        x ^= x >> 27
        x *= _M2
        x ^= x >> 31
        total += tl.where(mask, x, 0)
    tl.atomic_add(out + position, tl.sum(total, axis=0).to(tl.int64, bitcast=True))


@dataclass
class _Table:
    """Rows for one kernel, and how many programs each row takes."""

    device: torch.device
    rows: list[tuple[int, ...]] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)

    def add(self, programs: int, *row: int) -> None:
        self.rows.append(row)
        self.programs.append(programs)

    def done(self) -> _Table:
        """Put it on the device."""
        if self.rows:
            counts = np.array(self.programs, dtype=np.int64)
            starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
            self.total = int(counts.sum())
            self.index = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(self.device)
            self.first = torch.from_numpy(starts).to(self.device)
            self.table = torch.tensor(self.rows, dtype=torch.int64, device=self.device)
        self.empty = not self.rows
        del self.rows, self.programs
        return self

    def launch(self, kernel, *arguments, **constants) -> None:
        if not self.empty:
            kernel[(self.total,)](self.index, self.first, self.table, *arguments, **constants)


class _Rows:
    """Strided rows to copy or to digest, sorted by the word size that their addresses allow."""

    def __init__(self, device: torch.device) -> None:
        self.by_unit = {8: _Table(device), 4: _Table(device)}

    def copy(self, name: str, source: int, source_stride: int, target: int, target_stride: int, width: int, nbytes: int) -> None:
        unit = _unit(name, source, source_stride, target, target_stride, width)
        self.by_unit[unit].add(-(-nbytes // (unit * 4096)), source, source_stride, target, target_stride, width, nbytes)

    def digest(self, name: str, address: int, stride: int, width: int, nbytes: int, position: int) -> None:
        unit = _unit(name, address, stride, width)
        self.by_unit[unit].add(-(-nbytes // (8 * 4096)), address, stride, width, nbytes, position)

    def done(self) -> _Rows:
        for table in self.by_unit.values():
            table.done()
        return self

    def launch(self, kernel, *arguments) -> None:
        for unit, table in self.by_unit.items():
            table.launch(kernel, *arguments, EIGHT=unit == 8)


def _unit(name: str, *numbers: int) -> int:
    for unit in (8, 4):
        if not any(n % unit for n in numbers):
            return unit
    raise RefitError(f"{name}: rows that do not begin and end on 4-byte boundaries cannot be refitted on a GPU ({numbers})")


def _geometry(name: str, view: torch.Tensor) -> tuple[int, int, int]:
    """Address, bytes from row to row, and bytes a row, of a view of one or two dimensions with contiguous rows."""
    size = view.element_size()
    width = view.shape[-1] * size
    if view.stride(-1) != 1 and view.shape[-1] != 1:
        raise RefitError(
            f"{name}: shape {list(view.shape)} with strides {list(view.stride())} has no contiguous rows; a refit on a GPU needs them"
        )
    stride = view.stride(0) * size if view.dim() == 2 and view.shape[0] > 1 else width
    if stride == width:  # contiguous: one long row, which needs no division into rows
        return view.data_ptr(), view.numel() * size, view.numel() * size
    return view.data_ptr(), stride, width


_Kind = tuple[torch.dtype, bool, str]  # of a block: type of the parameter, whether it is EVEN, where its SCALE comes from


class FusedSource(ShardSource):
    """Fills buckets on a GPU; the same bits as `ShardSource` in one pass over the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = self._parameters[0][1].device
        self._tables: dict[int, tuple[dict[_Kind, _Table], _Rows, _Rows, list[Slice]]] = {}
        self._fixed: dict[str, torch.Tensor] = {}  # keeps addresses of exchanged maxima and scales from refit to refit

    def exchange(self) -> None:
        super().exchange()
        self.maxima = {name: self._keep(f"maxima {name}", value) for name, value in self.maxima.items()}
        self.scales = {name: self._keep(f"scale {name}", value) for name, value in self.scales.items()}
        for name, value in self.input_scales.items():
            if name in self.scales:
                self._keep(f"input {name}", torch.tensor([value], device=self.device))

    def _keep(self, key: str, value: torch.Tensor) -> torch.Tensor:
        if key not in self._fixed:
            self._fixed[key] = value.clone()
        return self._fixed[key].copy_(value)

    @torch.no_grad()
    def fill(self, slot: Slot, with_digests: bool) -> None:
        if slot.plan.number not in self._tables:
            self._tables[slot.plan.number] = self._plan(slot.plan)
        blocks, rows, digests, others = self._tables[slot.plan.number]
        base = slot.buffer.data_ptr()
        for (dtype, even, scale), table in blocks.items():
            table.launch(_quantize, self._origin(dtype), slot.buffer, EVEN=even, SCALE=scale, **QUANTIZE_OPTIONS)
        rows.launch(_copy, 0, base)
        for part in others:
            slot.tensor(part).copy_(self.values(part))
        if with_digests:
            slot.digests.zero_()
            digests.launch(_digest, base, slot.digests)

    def _plan(self, plan: BucketPlan) -> tuple[dict[_Kind, _Table], _Rows, _Rows, list[Slice]]:
        blocks: dict[_Kind, _Table] = {}
        rows, digests, others = _Rows(self.device), _Rows(self.device), []
        scale_of = {part.name: part for part in plan.slices}
        by_name = {name: i for i, name in enumerate(self.table.formats)}
        weights = [i for i, part in enumerate(plan.slices) if part.name in by_name]
        follows = {i: plan.slices[i + 1] if i + 1 < len(plan.slices) else None for i in weights}
        for position, part in enumerate(plan.slices):
            digests.digest(part.name, part.offset, part.nbytes, part.nbytes, part.nbytes, position)
            if part.name not in by_name:
                continue
            values = self.values(part)
            if part.dtype == "float8_e4m3fn":
                self._add_block(blocks, part, values, follows[position])
                if self.table.formats[part.name] == "fp8_per_tensor":
                    for key, name in (("scale", per_tensor_scale(part.name)), ("input", input_scale(part.name))):
                        if name in scale_of:
                            rows.copy(name, self._fixed[f"{key} {part.name}"].data_ptr(), 4, scale_of[name].offset, 4, 4, 4)
            elif values.dtype == torch.bfloat16:
                address, stride, width = _geometry(part.name, values)
                rows.copy(part.name, address, stride, part.offset, width, width, part.nbytes)
            else:
                others.append(part)
        return {key: table.done() for key, table in blocks.items()}, rows.done(), digests.done(), others

    def _add_block(self, blocks: dict[_Kind, _Table], part: Slice, values: torch.Tensor, follower: Slice | None) -> None:
        (r0, r1), (c0, c1) = part.box
        across, down = -(-c1 // 128) - c0 // 128, -(-r1 // 128) - r0 // 128
        scale = follower if follower is not None and follower.name == scale_name(part.name) else None
        scale_at, scale_stride = (scale.offset, scale.box[1][1] - scale.box[1][0]) if scale else (-1, 0)
        maxima = maxima_stride = fixed = 0
        kind = "own"
        if self.table.formats[part.name] == "fp8_per_tensor":
            fixed, kind = self.scales[part.name].data_ptr(), "fixed"
        elif part.name in self.maxima:
            whole, kind = self.maxima[part.name], "shared"
            maxima, maxima_stride = whole[r0 // 128 :, c0 // 128 :].data_ptr(), whole.stride(0)
        away = (values.data_ptr() - self._origin(values.dtype).data_ptr()) // values.element_size()
        whole_blocks = not any(n % 128 for n in (r0, r1, c0, c1))
        even = whole_blocks and not any(n % 16 for n in (values.data_ptr(), values.stride(0), away, part.offset))
        blocks.setdefault((values.dtype, even, kind), _Table(self.device)).add(
            across * down,
            away, values.stride(0), r1 - r0, c1 - c0, r0 % 128, c0 % 128, part.offset, across,
            scale_at, -(-r0 // 128) - r0 // 128, -(-c0 // 128) - c0 // 128, scale_stride, maxima, maxima_stride, fixed,
        )  # fmt: skip

    def _origin(self, dtype: torch.dtype) -> torch.Tensor:
        """The parameter to which addresses of parameters of its type are relative."""
        return next(p for _, p in self._parameters if p.dtype == dtype)


class FusedLandings:
    """Loads buckets on a GPU: where each slice lands is recorded once, then written there directly."""

    def __init__(self, landings: Landings) -> None:
        self.landings, self.label = landings, landings.label
        self.device = next(iter(landings.places.values())).view.device
        self._tables: dict[int, tuple[_Rows, _Rows, _Rows]] = {}
        self._arrived: list[tuple[BucketPlan, torch.Tensor, torch.Tensor | None]] = []

    @torch.no_grad()
    def load(self, slot: Slot, verify: bool) -> None:
        store, _, digests = self._plan(slot.plan)
        store.launch(_copy, slot.buffer.data_ptr(), 0)
        wrong = None
        if verify:
            live = torch.zeros(len(slot.plan.slices), dtype=torch.int64, device=self.device)
            digests.launch(_digest, 0, live)
            wrong = live != slot.digests
        self._arrived.append((slot.plan, slot.header.clone(), wrong))

    def fetch(self, slot: Slot) -> None:
        self._plan(slot.plan)[1].launch(_copy, 0, slot.buffer.data_ptr())

    def arrivals(self) -> list[Arrival]:
        done, self._arrived = self._arrived, []
        if not done:
            return []
        headers = torch.stack([header for _, header, _ in done]).tolist()
        checked = [wrong for _, _, wrong in done if wrong is not None]
        any_wrong = bool(torch.cat(checked).any()) if checked else False
        found = []
        for (plan, _, wrong), header in zip(done, headers, strict=True):
            bad = (
                [part for part, is_bad in zip(plan.slices, wrong.tolist(), strict=True) if is_bad]
                if any_wrong and wrong is not None
                else []
            )
            found.append(Arrival(plan, header, bad, 0 if wrong is None else len(plan.slices)))
        return found

    def _plan(self, plan: BucketPlan) -> tuple[_Rows, _Rows, _Rows]:
        if plan.number not in self._tables:
            store, fetch, digests = _Rows(self.device), _Rows(self.device), _Rows(self.device)
            for position, part in enumerate(plan.slices):
                address, stride, width = _geometry(part.name, self.landings.view(part))
                store.copy(part.name, part.offset, width, address, stride, width, part.nbytes)
                fetch.copy(part.name, address, stride, part.offset, width, width, part.nbytes)
                digests.digest(part.name, address, stride, width, part.nbytes, position)
            self._tables[plan.number] = (store.done(), fetch.done(), digests.done())
        return self._tables[plan.number]


def digest_views(views: list[torch.Tensor]) -> list[int]:
    """Digest of each tensor's values in row-major order, on its GPU.

    Raises:
        RefitError: rows of a tensor are not contiguous or not aligned to 4 bytes.
    """
    device = views[0].device
    rows, found = _Rows(device), torch.zeros(len(views), dtype=torch.int64, device=device)
    for position, view in enumerate(views):
        address, stride, width = _geometry(f"tensor {position}", view)
        rows.digest(f"tensor {position}", address, stride, width, view.numel() * view.element_size(), position)
    rows.done().launch(_digest, 0, found)
    return found.tolist()
