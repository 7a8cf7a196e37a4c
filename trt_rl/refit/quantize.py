"""FP8 quantization of slices of a tensor, on the block grid of the whole Hugging Face tensor: ModelOpt's arithmetic.

A tensor-parallel cut may run through a block. The block's maximum is then exchanged between the ranks that
share it, so the scale, and with it every bit of the result, is the one that quantizing the whole tensor gives.
This is the reference and the CPU's path; `kernels` does the same in one pass on a GPU, bit for bit.
"""

from __future__ import annotations

import torch

from trt_rl.refit.names import Box
from trt_rl.refit.precision import BLOCK, grid

E4M3_MAX = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_BLOCKS = {-1: BLOCK, -2: BLOCK}


def touched(box: Box) -> tuple[slice, ...]:
    """The blocks that `box` reaches, as an index into the tensor's block grid."""
    return tuple(slice(start // BLOCK, -(-stop // BLOCK)) for start, stop in box)


def on_grid(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether `box` consists of whole blocks of a tensor of `shape`."""
    return all(start % BLOCK == 0 and (stop % BLOCK == 0 or stop == n) for (start, stop), n in zip(box, shape, strict=True))


def block_maxima(box: Box, values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of `values` in every block that `box` touches, FP32; NaN and Inf show through."""
    from modelopt.torch.quantization.utils import reduce_block_amax

    return reduce_block_amax(_window(box, values), _BLOCKS)


def grid_maxima(shape: tuple[int, ...], pieces: list[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """Largest magnitude in every block of a tensor of `shape`, as far as `pieces` reach; 0 elsewhere. FP32."""
    amax = torch.zeros(grid(shape), dtype=torch.float32, device=pieces[0][1].device)
    for box, values in pieces:
        at = touched(box)
        amax[at] = torch.maximum(amax[at], block_maxima(box, values))
    return amax


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """The scale that multiplies stored FP8 values, FP32.

    Divided by a tensor: CUDA turns a division by a Python number into a product with its rounded reciprocal, which
    differs in the last bit from what a CPU gives for the same block. ModelOpt divides by the scale unguarded: an
    all-zero block would give 0/0, a denormal scale overflows e4m3; both get the scale 1.
    """
    scales = amax / torch.tensor(E4M3_MAX, device=amax.device)
    return torch.where(scales < SMALLEST_SCALE, 1.0, scales)


def quantize_blocks(box: Box, values: torch.Tensor, amax: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `values`, which are `tensor[box]`, to e4m3 with one FP32 scale per 128x128 block.

    Args:
        amax: of every block that the box touches, over the whole block, when the box cuts blocks.

    Returns:
        e4m3 values of the box, and the scales of the blocks that it touches.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor

    window = _window(box, values)
    scales = scales_of(block_maxima(box, values) if amax is None else amax)
    result, _ = FP8QTensor.quantize(window, scales=scales, block_sizes=_BLOCKS)
    inner = tuple(slice(start % BLOCK, start % BLOCK + n) for (start, _), n in zip(box, values.shape, strict=True))
    return result._quantized_data[inner], scales


def quantize_per_tensor(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize `values` to e4m3 with one FP32 scale `[1]`, ModelOpt's per-tensor form."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    return FP8QTensor.quantize(values.float(), scales=scale)[0]._quantized_data


def _window(box: Box, values: torch.Tensor) -> torch.Tensor:
    """`values` in FP32, inside a zero frame that starts and ends on the block grid."""
    size = [-(-stop // BLOCK) * BLOCK - start // BLOCK * BLOCK for start, stop in box]
    if size == list(values.shape):
        return values.float()
    frame = torch.zeros(size, dtype=torch.float32, device=values.device)
    frame[tuple(slice(start % BLOCK, start % BLOCK + n) for (start, _), n in zip(box, values.shape, strict=True))] = values.float()
    return frame
