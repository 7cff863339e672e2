"""What memlab's torch-free half says, as one JSON line: the same on every Python.

Runs in a bare Python and in Pyodide, without pytest; `sys.path` holds memlab.
"""

import importlib
import json
import sys

ROOMS = """
units hardware models recipe published operations walk footprint trace allocator snapshot viewer planner
engines oom doctor exercises
""".split()  # noqa: SIM905

for room in ROOMS:
    importlib.import_module(f"memlab.{room}")
foreign = {name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "matplotlib"}
assert not foreign, f"the torch-free half loads {foreign}"

from memlab import engines, hardware, models, oom, planner  # noqa: E402
from memlab.allocator import replay  # noqa: E402
from memlab.footprint import footprint  # noqa: E402
from memlab.recipe import Recipe  # noqa: E402
from memlab.trace import from_events  # noqa: E402

said: dict[str, object] = {}
for name in models.MODELS:
    config = models.model(name)
    said[name] = [config.parameter_count, str(footprint(config, Recipe(micro_batch=2), "A100-80GB"))]
said["cards"] = {name: card.memory_bytes for name, card in hardware.GPUS.items()}
said["plan"] = str(planner.plan("llama2-70b", "A100-80GB", count=8, sequence=4096, effective_batch=64))
fsdp = Recipe(precision="bf16-master", zero_stage=3, world_size=8, checkpointing="full")
said["export"] = {
    engine: str(engines.export(engine, models.model("llama3-8b"), fsdp)) for engine in sorted(engines.ENGINES)
}
message = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "14.75 GiB of which 1.05 GiB is free. Process 1 has 13.69 GiB memory in use. Of the allocated memory "
    "11.50 GiB is allocated by PyTorch, and 2.04 GiB is reserved by PyTorch but unallocated."
)
said["oom"] = str(oom.read(message))
trace = from_events([3 * 2**20, 40 * 2**20, -3 * 2**20, 2**20, 2**9, -40 * 2**20])
said["allocator"] = replay(trace.events, trace.sizes, capacity=2**30).reserved
print(json.dumps(said))
