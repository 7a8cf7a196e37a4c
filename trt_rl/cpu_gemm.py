"""BF16 matrix products on CPUs without BF16 instructions: multiply in FP32, round the result once.

torch falls back to a scalar loop there (measured about 1 GFLOP/s a core against 60 in FP32). The result is
what a tensor core gives: exact BF16 products, FP32 accumulation, one rounding.
"""

from __future__ import annotations

import warnings

import torch

_library: torch.library.Library | None = None


def native_bf16() -> bool:
    capabilities = torch.backends.cpu.get_cpu_capability()
    return capabilities.startswith("AVX512") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def install() -> None:
    """Replace the CPU kernels of `mm`, `bmm`, `addmm` and `baddbmm` for BF16; other dtypes keep theirs.

    Does nothing on a CPU that multiplies BF16 natively, and nothing the second time.
    """
    global _library
    if _library is not None or native_bf16():
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in (("mm", _mm), ("bmm", _bmm), ("addmm", _addmm), ("baddbmm", _baddbmm)):
            _library.impl(name, kernel, "CPU")


# Each kernel computes through the `.out` overload, whose CPU kernel stays torch's own.


def _mm(a, b):
    out = torch.empty(a.shape[0], b.shape[1], dtype=_wide(a), device="cpu")
    torch.ops.aten.mm.out(a.to(out.dtype), b.to(out.dtype), out=out)
    return out.to(a.dtype)


def _bmm(a, b):
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=_wide(a), device="cpu")
    torch.ops.aten.bmm.out(a.to(out.dtype), b.to(out.dtype), out=out)
    return out.to(a.dtype)


def _addmm(bias, a, b, *, beta=1, alpha=1):
    out = torch.empty(a.shape[0], b.shape[1], dtype=_wide(a), device="cpu")
    wide = (t.to(out.dtype) for t in (bias, a, b))
    torch.ops.aten.addmm.out(*wide, beta=beta, alpha=alpha, out=out)
    return out.to(a.dtype)


def _baddbmm(bias, a, b, *, beta=1, alpha=1):
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=_wide(a), device="cpu")
    wide = (t.to(out.dtype) for t in (bias, a, b))
    torch.ops.aten.baddbmm.out(*wide, beta=beta, alpha=alpha, out=out)
    return out.to(a.dtype)


def _wide(a: torch.Tensor) -> torch.dtype:
    return torch.float32 if a.dtype is torch.bfloat16 else a.dtype
