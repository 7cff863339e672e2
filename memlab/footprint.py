"""What one training step holds, computed from named tensors. No torch, no tensor is made.

    print(footprint("gpt2", Recipe(micro_batch=4, sequence=512, precision="fp32")))

How it works. `operations` writes the models down a second time, as lists of operations with shapes: what
each one makes, what autograd saves of it and why. `walk` goes through the step as PyTorch does (forward,
loss, backward in reverse, update), counts what is alive and keeps the largest moment of every phase. So
each byte of the answer belongs to a tensor with a name, a shape and a reason; nothing is fitted.

Consumers, as the meter counts them: activations are what the forward leaves for the backward (saved
tensors, logits, the batch, autocast's saved copies of the weights) and what recomputation leaves;
temporaries are all the rest that isn't a parameter, gradient or optimizer state. Bytes are those of the
tensors, not rounded as an allocator does.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab import hardware, models
from memlab.hardware import GPU
from memlab.models import ConvConfig, TransformerConfig
from memlab.recipe import Recipe
from memlab.units import CONSUMERS, PHASES, format_bytes, format_count, unknown_name
from memlab.walk import Tensor, Walk

DEVICES = ("cpu", "cuda")


# -- the answer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """Bytes of one training step, by consumer and by phase. All integers; see `includes`.

    * `consumers`: {consumer: its own largest bytes in the step}; these moments differ, so they don't add up
      to the peak
    * `phases`: {phase: {consumer: bytes, ..., 'total': bytes}} at the largest moment of that phase
    * `moments`: {phase: what is happening then}
    * `host`: {consumer: bytes kept in CPU memory or on NVMe instead} (offload)
    * `tensors`: what the step keeps, that is parameters, gradients, optimizer states and the activations
      saved for the backward, and the temporaries of the optimizer step
    """

    model: str
    recipe: Recipe
    device: str
    gpu: GPU | None
    parameter_count: int
    trained_count: int
    consumers: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    moments: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    includes: str
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_phase(self) -> str:
        """The phase of the peak; the earlier one of equals."""
        return max(PHASES, key=lambda phase: self.phases[phase]["total"])

    @property
    def peak_bytes(self) -> int:
        """The maximum over the phases: live tensor bytes, per GPU."""
        return self.phases[self.peak_phase]["total"]

    def consumers_at_peak(self) -> dict[str, int]:
        """{consumer: bytes} at the peak; these add up to `peak_bytes`."""
        return {name: self.phases[self.peak_phase][name] for name in CONSUMERS}

    def consumer_peaks(self) -> dict[str, int]:
        """{consumer: its own largest bytes in the step}."""
        return dict(self.consumers)

    def phase_peaks(self) -> dict[str, int]:
        """{phase: its largest live bytes}."""
        return {phase: self.phases[phase]["total"] for phase in PHASES}

    def of(self, consumer: str) -> list[Tensor]:
        """The tensors of one consumer, largest first."""
        if consumer not in CONSUMERS:
            raise unknown_name("consumer", consumer, CONSUMERS)
        return sorted((t for t in self.tensors if t.consumer == consumer), key=lambda t: -t.bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; every size an integer of bytes."""
        return {
            "model": self.model,
            "recipe": self.recipe.to_dict(),
            "device": self.device,
            "gpu": self.gpu.name if self.gpu else None,
            "parameter_count": self.parameter_count,
            "trained_count": self.trained_count,
            "consumers": dict(self.consumers),
            "phases": {phase: dict(row) for phase, row in self.phases.items()},
            "moments": dict(self.moments),
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "host": dict(self.host),
            "includes": self.includes,
            "tensors": [
                {
                    "name": t.name, "consumer": t.consumer, "shape": list(t.shape), "dtype": t.dtype,
                    "count": t.count, "bytes": t.bytes, "phases": list(t.phases), "why": t.why,
                }
                for t in self.tensors
            ],
        }  # fmt: skip

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        for name in (*CONSUMERS, "total"):
            cells = [format_bytes(self.phases[phase][name]) for phase in PHASES]
            own = "" if name == "total" else format_bytes(self.consumers[name])
            yield name.replace("_", " "), [*cells, own]

    def _heading(self) -> str:
        each = "" if self.recipe.world_size == 1 else " per GPU"
        frozen = self.trained_count < self.parameter_count
        trained = f" ({format_count(self.trained_count)} trained)" if frozen else ""
        count = format_count(self.parameter_count)
        return f"{self.model}: {count} parameters{trained}, one training step{each}"

    def _verdict(self) -> str:
        text = f"peak {format_bytes(self.peak_bytes)}, in {self.peak_phase}: {self.moments[self.peak_phase]}"
        if self.gpu is not None:
            room = self.gpu.memory_bytes - self.peak_bytes
            fits = f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} too much"
            text += f"\n{self.gpu.name} holds {format_bytes(self.gpu.memory_bytes)}: {fits}"
        if self.host:
            kept = ", ".join(f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in self.host.items())
            text += f"\noutside the GPU: {kept}"
        return text

    def __str__(self) -> str:
        lines = [self._heading(), *self.recipe.describe().splitlines(), ""]
        lines.append(f"{'':<17}" + "".join(f"{word:>15}" for word in (*PHASES, "own largest")))
        lines += [f"{name:<17}" + "".join(f"{cell:>15}" for cell in cells) for name, cells in self._rows()]
        return "\n".join([*lines, "", self._verdict(), *_wrapped(self.includes)])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{word}</th>" for word in (*PHASES, "own largest"))
        body = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            + "".join(f"<td style='text-align:right'>{cell}</td>" for cell in cells)
            + "</tr>"
            for name, cells in self._rows()
        )
        recipe = html.escape(self.recipe.describe()).replace("\n", "<br>")
        verdict = html.escape(self._verdict()).replace("\n", "<br>")
        return (
            f"<div><b>{html.escape(self._heading())}</b><br>{recipe}<table><tr><th></th>{head}</tr>{body}</table>"
            f"{verdict}<br><small>{html.escape(self.includes)}</small></div>"
        )


def _wrapped(text: str, width: int = 80) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def footprint(
    model: str | TransformerConfig | ConvConfig,
    recipe: Recipe | None = None,
    gpu: str | GPU | None = None,
    *,
    device: str | None = None,
    **fields: Any,
) -> Footprint:
    """The memory of one training step, after the first (the optimizer has its states).

    `fields` are fields of a Recipe, given in place of one or to change one. `device` says whose kernels:
    'cuda', or 'cpu' to be compared with a step on the CPU; by default those of `gpu` if a card is named,
    else the CPU's. They differ in what they save: dropout masks (a byte on CUDA, a full element on the
    CPU), the softmax under autocast (fp32 on CUDA), attention with dropout (the CPU's SDPA falls back to
    stored scores). With sharding all bytes are one GPU's.

    Raises UnknownNameError for a model or card, RecipeError for a recipe this model can't run.
    """
    config = models.model(model) if isinstance(model, str) else model
    recipe = recipe or Recipe()
    card = hardware.gpu(gpu) if isinstance(gpu, str) else gpu
    recipe = (recipe.replace(**fields) if fields else recipe).resolve(config, card)
    device = device or ("cpu" if card is None else "cuda")
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    walk = Walk(config, recipe, device, card)
    walk.run()
    trained = sum(weight.count for weight in recipe.weights(config) if weight.trained)
    return Footprint(
        model=config.name,
        recipe=recipe,
        device=device,
        gpu=card,
        parameter_count=config.parameter_count + (trained if recipe.lora_rank is not None else 0),
        trained_count=trained,
        consumers=walk.largest,
        phases={phase: {**row, "total": sum(row.values())} for phase, row in walk.peaks.items()},
        moments=walk.moments,
        tensors=tuple(walk.tensors()),
        includes=_includes(recipe, device),
        host=walk.host,
    )


def _includes(recipe: Recipe, device: str) -> str:
    kernels = "CUDA's" if device == "cuda" else "the CPU's"
    text = (
        f"Counts the live tensors of a step with {kernels} operators, unrounded; buffers count as "
        "parameters, the batch, the logits and autocast's saved weight copies as activations. Not in it: "
        "library workspaces, the allocator's cache, the driver's context"
    )
    if recipe.data_parallel > 1 or recipe.tensor_parallel > 1:
        text += ", buffers of the communication library"
    return text + "."
