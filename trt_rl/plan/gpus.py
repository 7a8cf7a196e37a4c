"""GPUs that a plan knows: what their makers publish, for one GPU and dense matrices."""

from __future__ import annotations

from dataclasses import dataclass

from trt_rl.refit.forecast import Speeds


@dataclass(frozen=True)
class Gpu:
    memory_gib: float
    """What CUDA reports as total."""
    memory_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    """0: no FP8 tensor cores."""
    nvlink_gb_s: float
    """One direction."""
    network_gb_s: float
    """One direction, of the adapter that a usual node has for each GPU."""


GPUS = {
    "a100": Gpu(79.2, 2.04, 312, 0, 300, 25),
    "h100": Gpu(79.2, 3.35, 989, 1979, 450, 50),
    "h200": Gpu(139.8, 4.8, 989, 1979, 450, 50),
    "b200": Gpu(178.4, 8.0, 2250, 4500, 900, 50),
    "gb200": Gpu(184.0, 8.0, 2500, 5000, 900, 50),
}
"""A100 80GB SXM, H100 80GB SXM, H200 141GB SXM, B200 180GB, GB200 186GB. Data sheets of nvidia.com."""

LINK_SHARE = 0.78
"""Of a link's published speed that NCCL's point-to-point sends reach: 350 of 450 GB/s between two H200, see benchmarks/."""
NETWORK_SHARE = 0.9
"""Of the adapter between nodes; assumed."""


def speeds_of(gpu: Gpu, inside_gb_s: float | None = None, between_gb_s: float | None = None) -> Speeds:
    """What a refit's prediction assumes: the given speeds, or the published ones of `gpu` as far as they are reached."""
    return Speeds(
        gpu.nvlink_gb_s * LINK_SHARE if inside_gb_s is None else inside_gb_s,
        gpu.network_gb_s * NETWORK_SHARE if between_gb_s is None else between_gb_s,
    )
