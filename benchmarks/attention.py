"""Time and peak bytes of attention, forward + backward: eager, SDPA and our tiles.

    python -m benchmarks.attention [--tokens 8192] [--head 64] [--heads 1] [--block 256] [--json OUT]

fp32, causal, on CUDA where there is one, else on one thread, whose own CPU seconds count: a busy machine
slows them little. The implementations take turns, the best of `--runs` counts. Peak bytes are those of the
tensors, traced, beyond q, k, v and the output's gradient; kernels' own workspaces are not in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from memlab.techniques.attention import backend_that_ran, eager, sdpa, tiled
from memlab.units import format_bytes
from memlab.virtual import VirtualGPU


def step(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    out = attention(q, k, v, True)
    torch.autograd.grad(out, (q, k, v), gradient)


def make(heads: int, tokens: int, head: int, device: torch.device) -> tuple[Tensor, ...]:
    q, k, v, gradient = (torch.randn(1, heads, tokens, head, device=device) for _ in range(4))
    return *(t.requires_grad_() for t in (q, k, v)), gradient


def seconds(attention: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> float:
    if not tensors[0].is_cuda:
        start = time.process_time()
        step(attention, *tensors)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(attention, *tensors)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(attention: Callable[..., Tensor], heads: int, tokens: int, head: int) -> int:
    """On fake tensors: they give the real step's bytes and take no memory."""
    with VirtualGPU(None) as gpu:
        tensors = make(heads, tokens, head, torch.device("cpu"))
        step(attention, *tensors)
    return gpu.trace.peak_bytes - sum(t.numel() * t.element_size() for t in tensors)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ways: dict[str, Callable[..., Tensor]] = {
        "eager": eager,
        "sdpa": sdpa,
        "tiled": partial(tiled, block=options.block),
    }
    tensors = make(options.heads, options.tokens, options.head, device)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.runs):
        for name, attention in ways.items():
            best[name] = min(best[name], seconds(attention, tensors))
    peaks = {
        name: peak(attention, options.heads, options.tokens, options.head) for name, attention in ways.items()
    }

    print(
        f"{options.heads} x {options.tokens:,} tokens, head {options.head}, fp32, causal, forward + backward,"
        f" {device.type}, SDPA ran {backend_that_ran(*tensors[:3], True)}, best of {options.runs}"
    )
    for name in ways:
        print(
            f"  {name:<6} {best[name] * 1e3:>9,.1f} ms ({best[name] / best['sdpa']:.2f}x SDPA)"
            f" {format_bytes(peaks[name]):>12} ({peaks[name] / peaks['sdpa']:.2f}x SDPA)"
        )
    if options.json:
        data = {name: {"seconds": best[name], "peak_bytes": peaks[name]} for name in ways}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
