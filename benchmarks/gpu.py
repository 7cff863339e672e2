"""Formula, trace and a real GPU side by side, for some 25 training steps. Needs torch and the checkout only.

    python -m benchmarks.gpu [--json OUT] [--seconds 450] [--small]

Each step runs in a process of its own: two steps, the second with PyTorch's counters reset at each phase
(`max_memory_allocated`, `max_memory_reserved`) while the caching allocator records its events. The same
recipe is computed (`footprint`) and traced on a virtual card of this kind, and the recorded events are
replayed through our allocator. Beside them: the smallest memory fraction's out-of-memory error, real and
virtual; what a process holds outside the allocator; cuBLAS and cuDNN workspaces; copy bandwidths.

Without CUDA, or with --small, a few tiny steps run on the CPU (live tensors in place of the counters), so
that the script itself can be tested.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from memlab import hardware
from memlab.allocator import ORDERS, replay
from memlab.footprint import footprint
from memlab.hardware import GPU
from memlab.recipe import Recipe
from memlab.report import measure_step, trace_step
from memlab.units import MIB, PHASES, format_bytes

_ROOT = Path(__file__).resolve().parent.parent


def workloads(small: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> model and the fields of its recipe."""
    if small:
        bert: dict[str, Any] = {"micro_batch": 1, "sequence": 16, "precision": "fp32"}
        return {
            "lenet5 fp32": ("lenet5", {"micro_batch": 4, "precision": "fp32"}),
            "bert-base checkpointed": ("bert-base", {**bert, "checkpointing": "full"}),
        }
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    gpt: dict[str, Any] = {"micro_batch": 8, "sequence": 1024}
    for precision in ("fp32", "amp-bf16", "amp-fp16", "bf16"):
        found[f"gpt2 {precision} sdpa"] = "gpt2", {**gpt, "precision": precision}
    found |= {
        "gpt2 fp32 eager": ("gpt2", {**gpt, "precision": "fp32", "attention": "eager"}),
        "gpt2 amp-bf16 eager": ("gpt2", {**gpt, "precision": "amp-bf16", "attention": "eager"}),
        "gpt2 bf16 flash": ("gpt2", {**gpt, "precision": "bf16", "attention": "flash"}),
        "gpt2 amp-bf16 dropout": ("gpt2", {**gpt, "precision": "amp-bf16", "dropout": 0.1}),
        "gpt2 amp-bf16 checkpointed": ("gpt2", {**gpt, "precision": "amp-bf16", "checkpointing": "full"}),
        "gpt2 amp-bf16 every-4": ("gpt2", {**gpt, "precision": "amp-bf16", "checkpointing": "every-4"}),
        "gpt2 amp-bf16 accumulated": ("gpt2", {**gpt, "precision": "amp-bf16", "accumulation": 4}),
        "gpt2 amp-bf16 fused": ("gpt2", {**gpt, "precision": "amp-bf16", "optimizer_impl": "fused"}),
        "gpt2 fp32 for-loop": ("gpt2", {**gpt, "precision": "fp32", "optimizer_impl": "for-loop"}),
        "gpt2 fp32 gradients kept": ("gpt2", {**gpt, "precision": "fp32", "set_to_none": False}),
    }
    for length in (128, 200, 512):
        bert = {"micro_batch": 16, "sequence": length}
        found[f"bert-large fp32 s{length}"] = "bert-large", {**bert, "precision": "fp32"}
        found[f"bert-large amp-bf16 s{length}"] = "bert-large", {**bert, "precision": "amp-bf16"}
    for model in ("resnet50", "resnet152"):
        for precision in ("fp32", "amp-bf16"):
            found[f"{model} {precision}"] = model, {"micro_batch": 32, "precision": precision}
    llama: dict[str, Any] = {"micro_batch": 1, "sequence": 2048}
    found |= {
        "tinyllama-1.1b bf16": ("tinyllama-1.1b", {**llama, "precision": "bf16"}),
        "tinyllama-1.1b bf16 checkpointed": (
            "tinyllama-1.1b",
            {**llama, "precision": "bf16", "checkpointing": "full"},
        ),
        "tinyllama-1.1b bf16 LoRA": ("tinyllama-1.1b", {**llama, "precision": "bf16", "lora_rank": 16}),
    }
    return found


def card_of(name: str, capability: tuple[int, int]) -> tuple[GPU, str]:
    """The card of `memlab.hardware` that this device is, or the nearest by compute capability, and a note."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    named = [g for g in hardware.GPUS.values() if set(re.findall(r"[a-z0-9]+", g.name.lower())) & words]
    exact = [g for g in named if g.compute_capability == capability]
    if exact:
        return exact[0], ""
    near = min(
        hardware.GPUS.values(),
        key=lambda g: (
            abs(g.compute_capability[0] - capability[0]),
            abs(g.compute_capability[1] - capability[1]),
        ),
    )
    return near, f"{name} isn't in memlab.hardware: rules of {near.name} ({near.compute_capability})"


# --- one step, each in its own process ----------------------------------------------------------------------


def measure_cuda(model: str, recipe: Recipe) -> dict[str, Any]:
    """The second of two real steps: peaks by phase, and the allocator's events from the very first."""
    from memlab.step import workload

    torch.cuda.memory._record_memory_history(context=None, max_entries=5_000_000)
    work = workload(model, recipe, "cuda")
    work.step()
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_reserved()
    peaks = {phase: {"allocated": 0, "reserved": 0} for phase in PHASES}
    now: list[str] = []

    def close() -> None:
        if now:
            for kind, value in (
                ("allocated", torch.cuda.max_memory_allocated()),
                ("reserved", torch.cuda.max_memory_reserved()),
            ):
                peaks[now[-1]][kind] = max(peaks[now[-1]][kind], value)

    def mark(phase: str) -> None:
        close()
        torch.cuda.reset_peak_memory_stats()
        now.append(phase)

    torch.cuda.reset_peak_memory_stats()
    work.step(mark)
    torch.cuda.synchronize()
    close()
    free, total = torch.cuda.mem_get_info()
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    events, sizes = events_of(history)
    reserved = max(figures["reserved"] for figures in peaks.values())
    replayed = {order: replay(events, sizes, order=order).peak_reserved for order in ORDERS}
    return {
        "phases": peaks,
        "allocated": max(figures["allocated"] for figures in peaks.values()),
        "reserved": reserved,
        "outside_allocator": total - free - torch.cuda.memory_reserved(),
        "events": len(events),
        "replayed_reserved": replayed,
        "largest_reserved_of_all_steps": max(before, reserved),
    }


def events_of(history: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """PyTorch's recorded allocator events as `allocator.replay` reads them: events and sizes in bytes."""
    events: list[int] = []
    sizes: list[int] = []
    living: dict[int, int] = {}
    for entry in history:
        action = entry["action"]
        if action == "alloc":
            living[entry["addr"]] = len(sizes)
            events.append(len(sizes))
            sizes.append(entry["size"])
        elif action == "free_completed" and entry["addr"] in living:
            events.append(~living.pop(entry["addr"]))
    return events, sizes


def measure_cpu(model: str, recipe: Recipe) -> dict[str, Any]:
    """Live tensor bytes of a real step on the CPU; there is no reserved memory there."""
    trace = measure_step(model, recipe, device="cpu")
    phases = {phase: {"allocated": size} for phase, size in trace.phase_peaks().items()}
    return {"phases": phases, "allocated": trace.peak_bytes}


def predict(model: str, recipe: Recipe, card: GPU | None) -> dict[str, Any]:
    """Formula and trace: peaks by phase in bytes; with a card also reserved, over all orders of addresses."""
    formula = footprint(model, recipe, card)
    start = time.process_time()
    trace = trace_step(model, recipe, gpu=card, limit=2**62 if card else None)
    found: dict[str, Any] = {
        "formula": {
            "allocated": formula.peak_bytes,
            "phases": {phase: figures["total"] for phase, figures in formula.phases.items()},
        },
        "trace": {"allocated": trace.peak_bytes, "phases": dict(trace.phase_peaks())},
        "seconds": round(time.process_time() - start, 2),
        "caveats": list(trace.caveats),
    }
    if card is not None:
        done = {order: _reserved(model, recipe, card, order) for order in ORDERS}
        found["trace"] |= {"replayed": done}
    return found


def _reserved(model: str, recipe: Recipe, card: GPU, order: str) -> dict[str, int]:
    """Allocated and reserved peak of the second step, replayed from an empty card."""
    from memlab.step import workload
    from memlab.virtual import VirtualGPU, device

    with torch.random.fork_rng(devices=[]), VirtualGPU(card, limit=2**62) as gpu:
        work = workload(model, recipe, device())
        work.step()
        work.step()
    trace = gpu.trace
    done = replay(trace.events, trace.sizes, marks=trace.marks, order=order)
    last = max(i for i, span in enumerate(done.spans) if span.name == "forward")
    first = _start_of_step(done.spans, last)
    return {
        "allocated": max(span.allocated for span in done.spans[first:]),
        "reserved": max(span.reserved for span in done.spans[first:]),
    }


def _start_of_step(spans: Sequence[Any], last: int) -> int:
    """The span with which the last step begins: the first forward after the optimizer before it."""
    before = [i for i, span in enumerate(spans[:last]) if span.name == "optimizer"]
    return before[-1] + 1 if before else 0


# --- the card itself ----------------------------------------------------------------------------------------


def out_of_memory(model: str, recipe: Recipe, card: GPU) -> dict[str, Any]:
    """The same step in 7/8 of the memory it needs: the allocation that fails, really and virtually."""
    from memlab import oom
    from memlab.step import workload

    trace_free = _reserved(model, recipe, card, "split")
    total = torch.cuda.get_device_properties(0).total_memory
    limit = trace_free["reserved"] * 7 // 8
    torch.cuda.set_per_process_memory_fraction(limit / total)
    result: dict[str, Any] = {"limit": limit}
    for name in ("real", "virtual"):
        try:
            if name == "real":
                work = workload(model, recipe, "cuda")
                for _ in range(2):
                    work.step()
            else:
                trace_step(model, recipe, gpu=card, limit=limit + (card.context_bytes or 0))
            result[name] = None
        except torch.OutOfMemoryError as error:
            first = oom.read(str(error)).to_dict()["reports"][0]
            result[name] = {"message": str(error)[:600], "requested": first["requested"]}
    return result


def card_facts() -> dict[str, Any]:
    """Bytes outside the allocator, workspaces of the libraries, bandwidths of copies."""
    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    facts: dict[str, Any] = {
        "name": properties.name,
        "total_memory": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "context": total - free - torch.cuda.memory_reserved(),
        "workspaces": {},
        "copies_bytes_per_second": {},
    }
    for dtype in (torch.float32, torch.bfloat16):
        torch._C._cuda_clearCublasWorkspaces()
        a = torch.ones(512, 512, device="cuda", dtype=dtype)
        before = torch.cuda.memory_allocated()
        b = a @ a
        facts["workspaces"][f"matmul {dtype}"] = torch.cuda.memory_allocated() - before - b.nbytes
        bias = torch.ones(512, device="cuda", dtype=dtype)
        before = torch.cuda.memory_allocated()
        c = torch.addmm(bias, a, a)
        facts["workspaces"][f"addmm {dtype}, after matmul"] = (
            torch.cuda.memory_allocated() - before - c.nbytes
        )
    size = 512 * MIB
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, host in (
        ("pageable", torch.empty(size, dtype=torch.uint8)),
        ("pinned", torch.empty(size, dtype=torch.uint8, pin_memory=True)),
    ):
        facts["copies_bytes_per_second"][f"host to device, {name}"] = _rate(
            lambda h=host: there.copy_(h), size
        )
        facts["copies_bytes_per_second"][f"device to host, {name}"] = _rate(
            lambda h=host: h.copy_(there), size
        )
    other = torch.empty_like(there)
    facts["copies_bytes_per_second"]["device to device (read + write)"] = _rate(
        lambda: other.copy_(there), 2 * size
    )
    return facts


def _rate(copy: Any, size: int, times: int = 8) -> int:
    copy()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return round(size / best)


# --- all of them --------------------------------------------------------------------------------------------


def _child(arguments: Sequence[str], *, cuda: bool, timeout: float) -> dict[str, Any]:
    """This script again, in its own process: what it printed last, or why there is nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", *arguments],
            cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=max(timeout, 1), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {timeout:.0f} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"failed": (lines[-1] if lines else f"exit code {done.returncode}")[:300]}


def _one(name: str, what: str, small: bool, card: GPU | None) -> dict[str, Any]:
    model, fields = workloads(small)[name]
    recipe = Recipe(**fields)
    if what == "predict":
        return predict(model, recipe, card)
    if what == "oom":
        assert card is not None
        return out_of_memory(model, recipe, card)
    return measure_cpu(model, recipe) if card is None else measure_cuda(model, recipe)


def run(seconds: float, small: bool) -> dict[str, Any]:
    """Everything, within `seconds`; what didn't get its turn says so."""
    end = time.monotonic() + seconds
    cuda = torch.cuda.is_available() and not small
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": "cpu",
    }
    options = ["--small"] if small or not cuda else []
    if cuda:
        card, note = card_of(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
        options = ["--card", card.name]
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        result |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "driver": driver.stdout.strip(),
            "card": card.name,
            "note": note,
            "facts": _child([*options, "--facts"], cuda=True, timeout=60),
        }
        print(f"{result['device']}, torch {result['torch']}, rules of {card.name} {note}", flush=True)
    names = list(workloads(not cuda))
    rows: dict[str, Any] = {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        predictions: dict[str, Future[dict[str, Any]]] = {
            name: pool.submit(
                _child, [*options, "--one", name, "--what", "predict"], cuda=False, timeout=seconds
            )
            for name in names
        }
        for name in names:
            left = end - time.monotonic()
            if left < 15:
                rows[name] = {"measured": {"failed": f"no time left of {seconds:.0f} s"}}
                continue
            measured = _child(
                [*options, "--one", name, "--what", "measure"], cuda=cuda, timeout=min(left, 120)
            )
            rows[name] = {"measured": measured}
            print(f"  {name}: {_said(measured)}", file=sys.stderr, flush=True)
        for name in names:
            rows[name] = {**predictions[name].result(), **rows[name]}
    result["rows"] = rows
    if cuda and end - time.monotonic() > 30:
        result["out_of_memory"] = _child(
            [*options, "--one", "gpt2 amp-bf16 sdpa", "--what", "oom"], cuda=True, timeout=60
        )
    return result


def _said(measured: dict[str, Any]) -> str:
    return measured.get("failed") or format_bytes(measured["allocated"])


def render(result: dict[str, Any]) -> str:
    """The table: formula, trace and measured peak, and the errors of both."""
    lines = [
        f"{result['device']}, torch {result['torch']}",
        f"{'':<32}{'formula':>12}{'trace':>12}{'measured':>12}{'formula':>9}{'trace':>9}"
        f"{'reserved: trace':>17}{'replay':>9}",
    ]
    for name, row in result["rows"].items():
        measured = row["measured"]
        if "failed" in measured or "failed" in row:
            lines.append(f"{name:<32}{measured.get('failed') or row['failed']}")
            continue
        true = measured["allocated"]
        formula = row["formula"]["allocated"]
        trace = row["trace"].get("replayed", {}).get("split", row["trace"])
        cells = "".join(f"{format_bytes(n):>12}" for n in (formula, trace["allocated"], true))
        cells += "".join(f"{(n - true) / true:>+9.2%}" for n in (formula, trace["allocated"]))
        if "reserved" in measured:
            events = measured["replayed_reserved"]["split"]
            whole = measured["largest_reserved_of_all_steps"]
            cells += f"{(trace['reserved'] - measured['reserved']) / measured['reserved']:>+17.2%}"
            cells += f"{(events - whole) / whole:>+9.2%}"
        lines.append(f"{name:<32}{cells}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=450, help="stop measuring after this long")
    parser.add_argument("--small", action="store_true", help="a few tiny steps on the CPU")
    parser.add_argument("--card", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--what", default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    card = hardware.gpu(options.card) if options.card else None
    if options.facts:
        print(json.dumps(card_facts()))
        return
    if options.one:
        print(json.dumps(_one(options.one, options.what, options.small, card)))
        return
    result = run(options.seconds, options.small)
    print(render(result))
    if options.json:
        part = options.json.with_name(options.json.name + ".part")
        part.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        part.replace(options.json)


if __name__ == "__main__":
    main()
