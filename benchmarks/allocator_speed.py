"""Events per second of the allocator's replay, on one core.

    python -m benchmarks.allocator_speed [--json OUT]

The stream is that of training steps of an 80-layer model: parameters that stay, activations saved in forward
and freed in backward, short-lived buffers, gradients, optimizer states. Drawn with a fixed seed, so the same
events are replayed each time; the best of five runs by processor time counts, the making of the events isn't
timed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from memlab.allocator import AllocatorConfig, replay
from memlab.units import KIB, MIB

OPTIONS = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4")


def training_events(steps: int = 50, layers: int = 80, seed: int = 0) -> tuple[list[int], list[int]]:
    """Events and sizes in bytes, about 4,000 events a step."""
    rng = random.Random(seed)
    events: list[int] = []
    sizes: list[int] = []

    def allocate(size: int) -> int:
        events.append(len(sizes))
        sizes.append(size)
        return len(sizes) - 1

    def free(block: int) -> None:
        events.append(~block)

    shapes = [[rng.randrange(64 * KIB, 24 * MIB) for _ in range(6)] for _ in range(layers)]
    saved_shapes = [rng.randrange(16 * KIB, 12 * MIB) for _ in range(9)]
    for layer in shapes:
        for size in layer:
            allocate(size)
            allocate(4 * rng.randrange(256, 4096))  # a bias
    states: list[int] = []
    for _ in range(steps):
        saved: list[int] = []
        for _ in range(layers):
            for size in saved_shapes:
                saved.append(allocate(size))
                if rng.random() < 0.5:
                    free(allocate(rng.randrange(512, 30 * MIB)))
        gradients: list[int] = []
        for layer in reversed(shapes):
            for size in layer:
                gradients.append(allocate(size))
            for _ in saved_shapes:
                short = allocate(rng.randrange(512, 12 * MIB))
                free(saved.pop())
                free(short)
        if not states:
            states = [allocate(2 * sizes[gradient]) for gradient in gradients]
        for gradient in gradients:
            free(gradient)
    return events, sizes


def events_per_second(config: AllocatorConfig | None = None, runs: int = 5) -> float:
    """The figure for `config` (None: PyTorch's defaults)."""
    events, sizes = training_events()
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        replay(events, sizes, config)
        best = min(best, time.process_time() - start)
    return len(events) / best


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Events per second of the allocator's replay, on one core.")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    events, _ = training_events()
    figures = {text or "defaults": events_per_second(AllocatorConfig.parse(text)) for text in OPTIONS}
    print(f"replay of {len(events):,} events, best of 5, one core")
    for name, figure in figures.items():
        print(f"  {name:<28} {figure:>12,.0f} events/s")
    if options.json:
        data = {
            "allocator_events_per_second": figures["defaults"],
            "by_options": figures,
            "events": len(events),
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
