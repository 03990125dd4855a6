"""Which arithmetic a run trains in: float32, or bfloat16 autocast where it is really faster."""

from __future__ import annotations

import time

import torch

MIN_GAIN = 1.2


def choose_precision(wanted: str, device: torch.device) -> str:
    """Return `float32` or `bfloat16`; `auto` is bfloat16 on a GPU that has it, and on a CPU by measurement."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if bfloat16_gain() >= MIN_GAIN else "float32"


def bfloat16_gain(size: int = 512, runs: int = 3) -> float:
    """Return how many times faster a bfloat16 matrix product is than a float32 one on this CPU (about 20 ms)."""
    return _product_seconds(torch.float32, size, runs) / _product_seconds(torch.bfloat16, size, runs)


def _product_seconds(dtype: torch.dtype, size: int, runs: int) -> float:
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(runs + 1):
        start = time.perf_counter()
        torch.nn.functional.linear(a, a)
        best = min(best, time.perf_counter() - start)
    return best
