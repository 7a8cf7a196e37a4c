"""A 64-bit digest of a slice's bytes that a GPU computes in parallel and a CPU computes alike.

The bytes are read as little-endian 64-bit words w_0, w_1, ... (the last one filled up with zeros); the digest is the
sum, modulo 2**64, of mix(w_i + (i + 1) * G), where `mix` is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014) and G its increment. `mix` is a bijection, so any change inside
one word changes the digest; other accidents are missed with probability about 2**-64. It is no protection against intent.
The GPU's form of it is in `kernels`.
"""

from __future__ import annotations

import numpy as np
import torch

GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 14  # words; temporaries stay in a core's cache
_STEPS = (np.arange(1, _CHUNK + 1, dtype=np.uint64)) * np.uint64(GOLDEN)


def digest(raw: torch.Tensor) -> int:
    """Digest of a contiguous uint8 tensor on the CPU, as a signed 64-bit number (the form in which it travels)."""
    data = raw.numpy()
    whole = data.size // 8
    total = _sum(_words(data[: whole * 8]), 0) if whole else 0
    if rest := data.size % 8:
        last = np.zeros(8, dtype=np.uint8)
        last[:rest] = data[whole * 8 :]
        total += _sum(last.view(np.uint64), whole)
    total &= 2**64 - 1
    return total - 2**64 if total >= 2**63 else total


def grain_digests(raw: torch.Tensor, grain: int) -> torch.Tensor:
    """Digest of every `grain` bytes (a multiple of 8 that divides the length) of a uint8 CPU tensor; int64."""
    words = _words(raw.numpy()).reshape(-1, grain // 8)
    result = np.empty(len(words), dtype=np.uint64)
    rows = max(1, _CHUNK // words.shape[1])
    steps = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    for start in range(0, len(words), rows):
        result[start : start + rows] = _mix(words[start : start + rows] + steps).sum(axis=1, dtype=np.uint64)
    return torch.from_numpy(result.view(np.int64))


def _words(data: np.ndarray) -> np.ndarray:
    return data.view(np.uint64) if data.ctypes.data % 8 == 0 else data.copy().view(np.uint64)


def _sum(words: np.ndarray, first: int) -> int:
    total = 0
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK]
        shift = np.uint64((first + start) * GOLDEN % 2**64)
        total += int(_mix(part + (_STEPS[: part.size] + shift)).sum(dtype=np.uint64))
    return total


def _mix(x: np.ndarray) -> np.ndarray:
    x ^= x >> np.uint64(30)
    x *= np.uint64(MULTIPLY_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(MULTIPLY_2)
    x ^= x >> np.uint64(31)
    return x
