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


def quantize_pieces(
    name: str, shape: tuple[int, ...], pieces: list[tuple[Box, torch.Tensor]], group: dist.ProcessGroup | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Quantize this rank's `pieces` of HF tensor `name` to e4m3 with one FP32 scale per 128x128 block.

    Args:
        shape: of the whole tensor.
        pieces: (box in the whole tensor, values of any float dtype).
        group: ranks that hold the other parts when a cut runs through a block, else None. Collective when given.

    Returns:
        e4m3 values of each piece, and the scales `[ceil(rows/128), ceil(columns/128)]`, meaningful for the
        blocks that the pieces touch.

    Raises:
        RefitError: a value is NaN or infinite.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from modelopt.torch.quantization.utils import reduce_block_amax

    windows = [_window(box, values) for box, values in pieces]
    amax = torch.zeros(grid(shape), dtype=torch.float32, device=pieces[0][1].device)
    for origin, window in windows:
        at = _grid_slices(origin, window)
        amax[at] = torch.maximum(amax[at], reduce_block_amax(window, _BLOCKS))
    finite = torch.isfinite(amax).all()
    if group is not None:
        # A rank that found NaN still takes part, so that its peers fail with it instead of waiting.
        amax = torch.where(torch.isfinite(amax), amax, torch.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        finite = torch.isfinite(amax).all()
    if not finite:
        raise RefitError(f"{name}: the trainer's weight holds NaN or Inf; the refit is refused")

    # Divided by a tensor: CUDA turns a division by a Python number into a product with its rounded reciprocal, which
    # differs in the last bit from what a CPU gives for the same block.
    scales = amax / torch.tensor(E4M3_MAX, device=amax.device)
    # ModelOpt divides by the scale unguarded: an all-zero block would give 0/0, a denormal scale overflows e4m3.
    scales[scales < _SMALLEST_SCALE] = 1.0
    quantized = []
    for (box, values), (origin, window) in zip(pieces, windows, strict=True):
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
