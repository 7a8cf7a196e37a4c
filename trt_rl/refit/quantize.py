"""FP8 quantization of a rank's pieces of a tensor, on the block grid of the whole Hugging Face tensor.

A tensor-parallel cut may run through a block. The block's maximum is then exchanged between the ranks that
share it, so the scale, and with it every bit of the result, is the one that quantizing the whole tensor gives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from trt_rl.errors import RefitError
from trt_rl.refit.names import Box
from trt_rl.refit.precision import BLOCK, grid

E4M3_MAX = 448.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_BLOCKS = {-1: BLOCK, -2: BLOCK}


def block_maxima(shape: tuple[int, ...], pieces: list[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """Largest magnitude in every block of a tensor of `shape`, as far as `pieces` reach; 0 elsewhere. FP32.

    Args:
        pieces: (box in the whole tensor, values of any float dtype).
    """
    from modelopt.torch.quantization.utils import reduce_block_amax

    amax = torch.zeros(grid(shape), dtype=torch.float32, device=pieces[0][1].device)
    for box, values in pieces:
        origin, window = _window(box, values)
        at = _grid_slices(origin, window)
        amax[at] = torch.maximum(amax[at], reduce_block_amax(window, _BLOCKS))
    return amax


def exchange_maxima(amax: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Maximum over the ranks of `group`, in place. NaN becomes Inf, so that every rank hears of it. Collective."""
    amax.copy_(torch.where(torch.isnan(amax), torch.inf, amax))
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)


def quantize_pieces(name: str, pieces: list[tuple[Box, torch.Tensor]], amax: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Quantize this rank's `pieces` of HF tensor `name` to e4m3 with one FP32 scale per 128x128 block.

    Args:
        amax: of every block that the pieces touch, over the whole block; see `block_maxima`, `exchange_maxima`.

    Returns:
        e4m3 values of each piece, and the scales `[ceil(rows/128), ceil(columns/128)]`, meaningful for the
        blocks that the pieces touch.

    Raises:
        RefitError: a value is NaN or infinite.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor

    if not torch.isfinite(amax).all():
        raise RefitError(f"{name}: the trainer's weight holds NaN or Inf; the refit is refused")
    # Divided by a tensor: CUDA turns a division by a Python number into a product with its rounded reciprocal, which
    # differs in the last bit from what a CPU gives for the same block.
    scales = amax / torch.tensor(E4M3_MAX, device=amax.device)
    # ModelOpt divides by the scale unguarded: an all-zero block would give 0/0, a denormal scale overflows e4m3.
    scales[scales < _SMALLEST_SCALE] = 1.0
    quantized = []
    for box, values in pieces:
        origin, window = _window(box, values)
        result, _ = FP8QTensor.quantize(window, scales=scales[_grid_slices(origin, window)], block_sizes=_BLOCKS)
        inner = tuple(slice(start - o, start - o + n) for (start, _), o, n in zip(box, origin, values.shape, strict=True))
        quantized.append(result._quantized_data[inner].contiguous())
    return quantized, scales


def owned_blocks(box: Box) -> list[tuple[int, int]] | None:
    """Range of blocks, per dimension, whose first element lies in `box`; None if there is none.

    Over disjoint boxes that cover a tensor, every block has exactly one owner, which sends its scale.
    """
    ranges = [(-(-start // BLOCK), -(-stop // BLOCK)) for start, stop in box]
    return ranges if all(a < b for a, b in ranges) else None


def _window(box: Box, values: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """`values` in FP32 inside a zero frame that starts and ends on the block grid, and the frame's origin."""
    origin = tuple(start // BLOCK * BLOCK for start, _ in box)
    size = [-(-(stop - o) // BLOCK) * BLOCK for (_, stop), o in zip(box, origin, strict=True)]
    frame = torch.zeros(size, dtype=torch.float32, device=values.device)
    frame[tuple(slice(s - o, e - o) for (s, e), o in zip(box, origin, strict=True))] = values.float()
    return origin, frame


def _grid_slices(origin: tuple[int, ...], window: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(o // BLOCK, (o + n) // BLOCK) for o, n in zip(origin, window.shape, strict=True))
