"""memlab: why training runs out of GPU memory, computed, traced and measured.

`import memlab` loads no torch: what needs it is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlab.chapter import begin
    from memlab.exercises import check, progress
    from memlab.footprint import Footprint
    from memlab.footprint import footprint as compute
    from memlab.meter import Meter
    from memlab.oom import read as explain_oom
    from memlab.planner import plan
    from memlab.recipe import Recipe
    from memlab.report import compare, measure_step, trace_step
    from memlab.trace import Trace
    from memlab.virtual import VirtualGPU, device

__version__ = "0.1.0"

_LAZY = {
    "Footprint": ("memlab.footprint", "Footprint"),
    "Meter": ("memlab.meter", "Meter"),
    "Recipe": ("memlab.recipe", "Recipe"),
    "Trace": ("memlab.trace", "Trace"),
    "VirtualGPU": ("memlab.virtual", "VirtualGPU"),
    "begin": ("memlab.chapter", "begin"),
    "check": ("memlab.exercises", "check"),
    "compare": ("memlab.report", "compare"),
    "compute": ("memlab.footprint", "footprint"),
    "device": ("memlab.virtual", "device"),
    "explain_oom": ("memlab.oom", "read"),
    "measure_step": ("memlab.report", "measure_step"),
    "plan": ("memlab.planner", "plan"),
    "progress": ("memlab.exercises", "progress"),
    "trace_step": ("memlab.report", "trace_step"),
}

__all__ = [
    "Footprint", "Meter", "Recipe", "Trace", "VirtualGPU", "begin", "check", "compare", "compute",
    "device", "explain_oom", "measure_step", "plan", "progress", "trace_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'memlab' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
