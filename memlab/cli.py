"""The command line: `memlab footprint | trace | compare | plan | oom | snapshot | doctor | gpus | models`.

Each command imports what it needs when it runs: `memlab footprint` answers without torch. Every field of
`Recipe` is a flag of the commands that train; `--recipe FILE.toml` gives several at once, and flags win over
the file. What goes wrong is one line on stderr with exit code 2, or 1 where a traced step runs out of memory;
Ctrl-C ends quietly with 130.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memlab import __version__
from memlab import recipe as recipes
from memlab.files import read_up_to, write_whole
from memlab.recipe import Recipe
from memlab.units import format_bytes, format_gb

if TYPE_CHECKING:
    from memlab.hardware import GPU
    from memlab.models import ConvConfig, TransformerConfig
    from memlab.planner import Plan
    from memlab.snapshot import SnapshotSummary

app = typer.Typer(
    name="memlab",
    help="Why training runs out of GPU memory: computed, traced and measured.",
    # Plain text: importing rich would take longer than answering.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _complete_models(incomplete: str) -> list[str]:
    from memlab.models import MODELS

    return [name for name in MODELS if name.startswith(incomplete.lower())]


def _complete_cards(incomplete: str) -> list[str]:
    from memlab.hardware import GPUS

    # a shell compares letter by letter, and memlab takes any case
    names = [name.lower() for name in GPUS] if incomplete.islower() else list(GPUS)
    return [name for name in names if name.startswith(incomplete)]


def _complete_field(name: str) -> Callable[[str], list[str]]:
    """Completes the values of a field of Recipe."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in _values(name) if value.startswith(incomplete)]

    return complete


def _values(name: str) -> list[str]:
    if name == "offload":
        return [f"{what}:{where}" for what in recipes.OFFLOAD_WHAT for where in recipes.OFFLOAD_WHERE]
    known: dict[str, Iterable[str]] = {
        "precision": recipes.PRECISIONS,
        "optimizer": recipes.OPTIMIZERS,
        "optimizer_impl": recipes.OPTIMIZER_IMPLS,
        "checkpointing": ("none", "full", "every-2", "every-4", "selective"),
        "attention": recipes.ATTENTION,
        "zero_stage": ("0", "1", "2", "3"),
        "base_weights": recipes.BASE_WEIGHTS,
        "lora_targets": recipes.LORA_TARGETS,
    }
    return list(known.get(name, ()))


Model = Annotated[
    str,
    typer.Argument(
        help="a name from `memlab models`, or the path of a Hugging Face config.json",
        metavar="MODEL",
        autocompletion=_complete_models,
    ),
]
Card = Annotated[
    str | None,
    typer.Option("--gpu", help="a name from `memlab gpus`", metavar="CARD", autocompletion=_complete_cards),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, sizes as integers in bytes")]

# A field's type as it is written -> the option's type and what stands for its value in the help.
_TYPES: dict[str, tuple[Any, str | None]] = {
    "str": (str | None, "NAME"),
    "int": (int | None, "N"),
    "int | None": (int | None, "N"),
    "float": (float | None, "P"),
    "bool": (bool | None, None),
    "tuple[str, ...]": (list[str] | None, "WHAT:WHERE"),
    "tuple[str, ...] | str": (str | None, "LAYERS"),
}


def _recipe_options() -> list[inspect.Parameter]:
    """One option for each field of Recipe; None means that it wasn't given."""
    options = []
    for field in fields(Recipe):
        kind, metavar = _TYPES[str(field.type)]
        help_text = field.metadata["help"]
        if field.default not in ("", None, ()):
            help_text += f" [{str(field.default).lower()}]"
        names = ("--sequence", "--seq") if field.name == "sequence" else ()
        option = typer.Option(
            *names,
            help=help_text,
            metavar=metavar,
            show_default=False,
            autocompletion=_complete_field(field.name) if _values(field.name) else None,
        )
        annotation = Annotated[kind, option]  # type: ignore[valid-type]  # made at run time
        options.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return options


def _with_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, which takes a Recipe called `recipe`, the flags that make one."""

    @functools.wraps(command)
    def run(recipe: Path | None, **given: Any) -> None:
        names = [field.name for field in fields(Recipe)]
        changes = {name: value for name in names if (value := given.pop(name)) not in (None, [])}
        if "" in changes.values():  # an empty shell variable, not a choice
            name = next(name for name, value in changes.items() if value == "")
            raise ValueError(f"--{name.replace('_', '-')} has no value")
        base = Recipe.from_toml(recipe) if recipe is not None else Recipe()
        command(recipe=base.replace(**changes), **given)

    file = inspect.Parameter(
        "recipe",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option("--recipe", metavar="FILE", help="a TOML file with any of the keys below"),
        ],
    )
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "recipe"
    ]
    run.__signature__ = inspect.Signature([*own, file, *_recipe_options()])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    del run.__wrapped__  # typer would read the hints of the command beneath
    return run


def _print(text: object) -> None:
    print(text)


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def _card(name: str | None) -> GPU | None:
    from memlab.hardware import gpu as find_card

    return find_card(name) if name is not None else None


def _writable(out: Path | None) -> None:
    """Refuses, before the work, what can't be written after it."""
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: there is no such folder to write to")
    if out.exists() and not out.is_file():
        raise ValueError(f"{out} isn't a regular file: choose a file's name to write to")


def _resolve(name: str, recipe: Recipe, card: GPU | None) -> tuple[TransformerConfig | ConvConfig, Recipe]:
    """The model called `name` and the recipe made whole for it: mistakes come out before torch is loaded."""
    from memlab.models import model as find_model

    if ":" in name and not Path(name).exists():
        raise ValueError(f"{name}: only plan takes a module's function: memlab plan {name} --gpu CARD")
    config = find_model(name)
    return config, recipe.resolve(config, card)


def _print_notes(recipe: Recipe, config: TransformerConfig | ConvConfig, card: GPU | None) -> None:
    for note in recipe.notes(config, card):
        print(textwrap.fill(f"note: {note}", 80))


@app.command()
@_with_recipe
def footprint(model: Model, recipe: Recipe, gpu: Card = None, as_json: AsJson = False) -> None:
    """Compute one step's memory by closed forms, without torch.

    Example:

    memlab footprint llama2-7b --checkpointing full --gpu A100-80GB
    """
    card = _card(gpu)
    config, recipe = _resolve(model, recipe, card)
    from memlab.footprint import footprint as compute

    result = compute(config, recipe, card)
    if as_json:
        _print_json(result.to_dict())
    else:
        _print(result)
        _print_notes(recipe, config, card)


@app.command()
@_with_recipe
def trace(
    model: Model,
    recipe: Recipe,
    gpu: Card = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="write the trace to this file (.json.gz), or a page to look at it (.html)",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what one step allocates, at any size, on fake tensors.

    Example:

    memlab trace gpt2 --micro-batch 4 --sequence 512 --precision fp32
    """
    card = _card(gpu)
    config, recipe = _resolve(model, recipe, card)
    _writable(out)
    if out is not None and out.suffix.lower() not in (".gz", ".html", ".htm"):
        raise ValueError(f"{out}: end the name in .json.gz for the trace, in .html for a page to look at")
    from memlab.report import trace_step

    result = trace_step(config, recipe, gpu=card)
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        from memlab.viewer import write_viewer

        write_viewer(result, out)
    elif out is not None:
        result.save(out)
    if as_json:
        _print_json(result.to_dict())
    else:
        _print(f"{config.name}, one training step\n{recipe.describe()}\n")
        for line in str(result).splitlines():
            _print(textwrap.fill(line, 80) if line.startswith(("note:", "phases:")) else line)
        _print_notes(recipe, config, card)


@app.command()
@_with_recipe
def compare(
    model: Model,
    recipe: Recipe,
    gpu: Card = None,
    measure: Annotated[bool, typer.Option(help="also run the step here, if it fits")] = True,
    as_json: AsJson = False,
) -> None:
    """Show formula, trace and measurement side by side.

    Example:

    memlab compare gpt2 --micro-batch 4 --sequence 512 --precision fp32
    """
    card = _card(gpu)
    config, recipe = _resolve(model, recipe, card)
    from memlab.report import compare as put_side_by_side

    result = put_side_by_side(config, recipe, gpu=card, measure=measure)
    if as_json:
        _print_json(result.to_dict())
    else:
        _print(result)
        _print_notes(recipe, config, card)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="a name from `memlab models`, a Hugging Face config.json, or package.module:function that "
            "builds a model",
            metavar="MODEL",
            autocompletion=_complete_models,
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", help="a name from `memlab gpus`", metavar="CARD", autocompletion=_complete_cards
        ),
    ],
    count: Annotated[int, typer.Option(help="cards in all", metavar="N")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(
            "--sequence", "--seq", help="tokens [the model's context]", metavar="N", show_default=False
        ),
    ] = None,
    effective_batch: Annotated[
        int | None,
        typer.Option(
            help="sequences or images of one step on all cards [1 a card]", metavar="N", show_default=False
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe", help="the recipe you have, TOML [plain fp32]", metavar="FILE", show_default=False
        ),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="adapters of rank 16 on frozen weights will do too")
    ] = False,
    host_memory: Annotated[
        str | None,
        typer.Option(help="of a machine, to offload to [no limit]", metavar="SIZE", show_default=False),
    ] = None,
    nvme: Annotated[
        str | None,
        typer.Option(help="of a machine, to offload to [none]", metavar="SIZE", show_default=False),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="between a machine's cards [theirs]", metavar="LINK", show_default=False),
    ] = None,
    inter_link: Annotated[
        str | None,
        typer.Option(help="between machines [by the card's age]", metavar="LINK", show_default=False),
    ] = None,
    host_link: Annotated[
        str | None,
        typer.Option(help="between card and host [the card's]", metavar="LINK", show_default=False),
    ] = None,
    host_memory_link: Annotated[
        str | None,
        typer.Option(
            help="between CPU and memory, for updates there [by the card's kind]",
            metavar="LINK",
            show_default=False,
        ),
    ] = None,
    mfu: Annotated[float, typer.Option(help="share of the dense peak that is reached", metavar="P")] = 0.4,
    engine: Annotated[
        str | None,
        typer.Option(
            "--export",
            help="write the winner for fsdp2|accelerate|deepspeed|torchtitan",
            metavar="ENGINE",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for --export [.]", metavar="DIR", show_default=False)
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace/--no-trace", help="confirm the winner on a virtual card")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest recipe that fits, and what each lever brings. Exit code 1: nothing does.

    Example:

    memlab plan llama2-70b --gpu A100-80GB --count 8 --effective-batch 1024
    """
    from memlab import engines, planner
    from memlab.units import parse_bytes, unknown_name

    if engine is not None and engine not in engines.ENGINES:
        raise unknown_name("engine", engine, engines.ENGINES)
    if out is not None and engine is None:
        raise ValueError("--out is the folder for --export: say for which engine")
    if out is not None:
        there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ValueError(f"{there} isn't a folder: choose another for --out")
    if ":" in model and not Path(model).exists():
        _plan_built(model, gpu, count, effective_batch or 1, mfu, engine, as_json)
        return
    found = planner.plan(
        model, gpu, count, effective_batch=effective_batch, sequence=seq,
        start=Recipe.from_toml(recipe) if recipe is not None else None,
        host_bytes=parse_bytes(host_memory) if host_memory is not None else None,
        nvme_bytes=parse_bytes(nvme) if nvme is not None else None,
        intra_link=link, inter_link=inter_link, host_link=host_link, host_memory_link=host_memory_link,
        mfu=mfu, allow={"lora_rank": (None, 16)} if lora else None,
    )  # fmt: skip
    traces = trace and bool(found.candidates or found.tight)
    if not as_json:
        _print(found.render(limits=not traces))
        sys.stdout.flush()
    sure = None
    if traces:
        sure = found.confirm(functools.partial(_traced, model, found))
        if not as_json:
            _print("\n" + sure.render())
    best = sure.best if sure is not None else found.best
    exported, paths = None, []
    if engine is not None:
        if best is None:
            raise ValueError("nothing fits, so there is nothing to export")
        each = found.assumptions.gpus_per_node
        exported = engines.export(engine, model, best.recipe, gpus_per_node=each)
        paths = exported.write(out or Path())
    if as_json:
        data = {**found.to_dict(), "confirmed": sure.to_dict() if sure is not None else None, "export": None}
        if exported is not None:
            data["export"] = {
                "engine": engine,
                "files": [str(path) for path in paths],
                "command": exported.command,
                "notes": list(exported.notes),
            }
        _print_json(data)
    elif exported is not None:
        _print("\n".join(["", *(f"wrote {path}" for path in paths), exported.command]))
        for note in exported.notes:
            _print(textwrap.fill(f"note: {note}", 100))
    if best is None:
        raise typer.Exit(1)


def _plan_built(
    name: str, gpu: str, count: int, batch: int, mfu: float, engine: str | None, as_json: bool
) -> None:
    """`memlab plan package.module:function`: every verdict is a trace's."""
    if count > 1 or engine is not None:
        raise ValueError(f"{name}: a built model is planned on one card, without --count and --export")
    card = _card(gpu)
    assert card is not None
    from memlab.built import load, plan_built

    result = plan_built(
        name, load(name), card, batch, mfu=mfu, says=lambda text: print(text, file=sys.stderr, flush=True)
    )
    if as_json:
        _print_json(result.to_dict())
    else:
        _print(result)


def _traced(model: str, found: Plan, recipe: Recipe) -> int | None:
    """The traced peak of `recipe` on the plan's card, None where its memory ends; says so as it begins."""
    from memlab.planner import brief

    print(f"tracing {brief(recipe)} ...", file=sys.stderr, flush=True)
    import torch

    from memlab.models import model as find_model
    from memlab.report import trace_step

    recipe = recipe.replace(accumulation=min(recipe.accumulation, 2))  # the third is like the second
    try:
        return trace_step(find_model(model), recipe, gpu=found.gpu, limit=found.limit).peak_bytes
    except torch.OutOfMemoryError:
        return None


@app.command()
@_with_recipe
def oom(
    recipe: Recipe,
    file: Annotated[
        str | None,
        typer.Argument(
            help="a log, a pasted message or a snapshot pickle; standard input without it or with -",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="name the tensor of this model's step that was asked for; the options below say which",
            metavar="MODEL",
            show_default=False,
            autocompletion=_complete_models,
        ),
    ] = None,
    gpu: Card = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="a snapshot of the same failure, to decide", metavar="FILE", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain an out-of-memory message, or a log with some.

    Example:

    memlab oom train.log --model gpt2 --micro-batch 32
    """
    card = _card(gpu)
    if model is None and recipe != Recipe():
        raise ValueError("options that describe a step need --model: what was trained?")
    chosen = _resolve(model, recipe, card) if model is not None else None
    from memlab.oom import Reports, name_tensors, read

    if file is not None and Path(file).is_char_device():
        raise ValueError(
            f"{file} is a device, which never ends: give a file, or pipe a log to standard input"
        )
    if file not in (None, "-") and _kind(Path(str(file))) != "text":
        found = Reports(snapshot=_summary(Path(str(file)), None))
    elif file in (None, "-"):
        if sys.stdin.isatty():
            print("memlab: paste the message or log here, then press Ctrl-D", file=sys.stderr)
        found = read(sys.stdin.buffer)
    else:
        found = read(Path(str(file)))
    if snapshot is not None:
        found.snapshot = _summary(snapshot, None)
    if chosen is not None:
        name_tensors(found, *chosen)
    for report in found:
        if card and report.total and abs(report.total - card.memory_bytes) > card.memory_bytes // 50:
            sizes = f"{format_bytes(report.total)}, {card.name} {format_bytes(card.memory_bytes)}"
            report.note = f"{report.note} The message's card has {sizes}: another card?".strip()
    if as_json:
        _print_json(found.to_dict())
    else:
        _print(found)


def _kind(file: Path) -> str:
    """'trace' (saved by memlab), 'snapshot' (a pickle) or 'text', by the first bytes, also inside gzip."""
    if file.exists() and not file.is_file():  # what a pipe gives can be read once
        return "text"
    with file.open("rb") as opened:
        head = opened.read(30)
    if head[:2] == b"\x1f\x8b":
        import gzip
        import zlib

        try:
            with gzip.open(file) as packed:
                head = packed.read(30)
        except (OSError, EOFError, zlib.error):
            return "text"
        if head.startswith(b'{"format":"memlab.trace'):
            return "trace"
    return "snapshot" if head[:1] == b"\x80" else "text"


def _summary(file: Path, at: str | None) -> SnapshotSummary:
    from memlab.snapshot import read_snapshot, summarise, summarise_trace, trace_of

    if _kind(file) == "trace":
        from memlab.trace import Trace

        return summarise_trace(Trace.load(file), at_peak=at != "end")
    data = read_snapshot(file)
    return summarise_trace(trace_of(data)) if at == "peak" else summarise(data)


@app.command()
def snapshot(
    file: Annotated[
        Path, typer.Argument(help="a snapshot of PyTorch's, or a trace that memlab saved", metavar="FILE")
    ],
    html: Annotated[
        Path | None,
        typer.Option(help="write the viewer, one page that opens offline", metavar="OUT", show_default=False),
    ] = None,
    top: Annotated[int | None, typer.Option(help="rows of the live list [12]", metavar="N", min=0)] = None,
    at: Annotated[
        str | None,
        typer.Option(
            help="peak or end; a trace is shown at its peak, a snapshot of PyTorch's at its end",
            metavar="MOMENT",
            show_default=False,
            autocompletion=lambda incomplete: [w for w in ("peak", "end") if w.startswith(incomplete)],
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is alive in a memory snapshot, by size.

    Example:

    memlab snapshot dump.pickle --top 20 --html memory.html
    """
    if at not in (None, "peak", "end"):
        raise ValueError(f"--at {at}: choose peak or end")
    _writable(html)
    summary = _summary(file, at)
    if html is not None:
        from memlab.allocator import replay
        from memlab.snapshot import read_snapshot, trace_of
        from memlab.trace import Trace
        from memlab.viewer import write_viewer

        shown = Trace.load(file) if _kind(file) == "trace" else trace_of(read_snapshot(file))
        write_viewer(shown, html, replay(shown.events, shown.sizes, marks=shown.marks), title=file.name)
    if as_json:
        _print_json(summary.to_dict(top))
    else:
        _print(summary.render(12 if top is None else top))
        if html is not None:
            _print(f"\nviewer written to {html}")


_LARGEST_NOTEBOOK = 2**28


@app.command()
def doctor(
    file: Annotated[Path, typer.Argument(help="your notebook of a chapter", metavar="FILE")],
    out: Annotated[
        Path | None,
        typer.Option(help="write the mended notebook here", metavar="OUT", show_default=False),
    ] = None,
    release: Annotated[
        Path | None,
        typer.Option(
            help="the chapter as it was handed out; memlab's own copy otherwise",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Look whether a chapter's notebook can be graded, and mend it; your answers are never changed.

    Example:

    memlab doctor 02_four_consumers.ipynb --out mended.ipynb
    """
    from memlab import doctor as room

    said: list[str] = []
    _writable(out)
    if out is not None and out.exists():
        raise ValueError(f"{out} is there already: choose another name, so that nothing is lost")
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} isn't a regular file: give the notebook's own path")
    notebook = room.read(read_up_to(file, _LARGEST_NOTEBOOK), said)
    if release is None:
        known = room.releases()
        if not known:
            raise ValueError(
                "this memlab came without the chapters: give the one you got with --release FILE"
            )
        release = known[room.chapter_of(notebook, file.name)]
    mended, repairs = room.repair(notebook, room.read(read_up_to(release, _LARGEST_NOTEBOOK)))
    _print(f"{file.name} is {release.stem}: {room.state(mended)}")
    broken = room.broken(mended)
    _print("\n".join(f"  - {line}" for line in [*broken, *said, *repairs]) or "  nothing to mend")
    if out is not None:
        write_whole(out, room.to_text(mended))
        _print(f"written to {out}, without outputs: hand this one in")
    elif said or repairs:
        _print("The grader mends the same by itself. To save a mended notebook, add --out mended.ipynb")


@app.command()
def gpus(
    name: Annotated[
        str | None,
        typer.Argument(help="one card, with its sources", metavar="CARD", autocompletion=_complete_cards),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List cards and links, or all facts of one card.

    Example:

    memlab gpus a100-80gb
    """
    from memlab.hardware import GPUS, LINKS
    from memlab.hardware import gpu as find_card

    if as_json:
        chosen = [find_card(name)] if name is not None else list(GPUS.values())
        _print_json(
            {"gpus": [asdict(card) for card in chosen], "links": [asdict(path) for path in LINKS.values()]}
        )
    elif name is not None:
        _print(_card_page(find_card(name)))
    else:
        _print(_cards_table(list(GPUS.values())))
        _print("\nlink           one direction  connects")
        for path in LINKS.values():
            _print(f"{path.name:<14} {path.bandwidth / 1e9:>8,.1f} GB/s  {path.connects}")


def _cards_table(cards: list[GPU]) -> str:
    rows = ["GPU        total_memory as CUDA reports it     bandwidth  dense 16-bit"]
    for card in cards:
        sixteen, peak = ("bf16", card.flops["bf16"]) if "bf16" in card.flops else ("fp16", card.flops["fp16"])
        rows.append(
            f"{card.name:<10} {format_bytes(card.memory_bytes):>10} = {format_gb(card.memory_bytes):>9} "
            f"{card.memory_kind:<6} {card.bandwidth / 1e9:>6,.0f} GB/s  "
            f"{peak / 1e12:>5,.0f} TFLOP/s {sixteen}"
        )
    return "\n".join(rows)


def _card_page(card: GPU) -> str:
    context = "no report known" if card.context_bytes is None else format_bytes(card.context_bytes)
    rows = [
        ("total_memory", f"{card.memory_bytes:,} B = {format_bytes(card.memory_bytes)} = "
                         f"{format_gb(card.memory_bytes)}"),
        ("", card.memory_source),
        ("marketed as", format_gb(card.marketed_bytes)),
        ("memory", f"{card.memory_kind}, {card.bus_bits} bits x {card.gbps_per_pin:g} Gb/s per pin = "
                   f"{card.bandwidth / 1e9:,.0f} GB/s"),
        ("compute", f"capability {card.compute_capability[0]}.{card.compute_capability[1]}"),
        *((f"  {dtype}", f"{peak / 1e12:,.1f} TFLOP/s dense peak") for dtype, peak in card.flops.items()),
        ("context", context),
        *((("", card.context_source),) if card.context_source else ()),
        ("to the host", card.host_link),
        ("to its peers", card.peer_link or "through the host"),
        ("source", card.source),
    ]  # fmt: skip
    return "\n".join([card.name, *(_row(key, text) for key, text in rows)])


def _row(key: str, text: str) -> str:
    lines = textwrap.wrap(text, 63)
    return "\n".join([f"  {key:<13} {lines[0]}", *(" " * 16 + line for line in lines[1:])])


@app.command()
def models(
    name: Annotated[
        str | None,
        typer.Argument(help="one model, or a config.json", metavar="MODEL", autocompletion=_complete_models),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List models and their sizes, or the shape of one.

    Example:

    memlab models llama2-70b
    """
    from memlab.models import MODELS, TransformerConfig
    from memlab.models import model as find_model

    chosen = [find_model(name)] if name is not None else list(MODELS.values())
    if as_json:
        _print_json([{**asdict(config), "parameter_count": config.parameter_count} for config in chosen])
        return
    if name is not None:
        _print(_model_page(chosen[0]))
        return
    _print("model               parameters  input                 shape")
    for config in chosen:
        if isinstance(config, TransformerConfig):
            size = f"{config.context} tokens"
            shape = f"{config.layers} x {config.hidden}, {config.heads} heads"
        else:
            size = f"{config.channels} x {config.image} x {config.image} pixels"
            shape = f"{config.blocks} blocks" if config.blocks else config.family
        _print(f"{config.name:<14} {config.parameter_count:>15,}  {size:<21} {shape}")


def _model_page(config: TransformerConfig | ConvConfig) -> str:
    rows = [("parameters", f"{config.parameter_count:,} in {len(config.parameters())} tensors")]
    rows += [
        (key, str(value))
        for key, value in asdict(config).items()
        if key != "name" and value not in (None, ())
    ]
    return "\n".join([config.name, *(_row(key, text) for key, text in rows)])


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        _print(f"memlab {__version__}")
    elif context.invoked_subcommand is None:
        _print(context.get_help())


def main() -> None:
    """The console script. Exit codes: 0, 1 out of memory, 2 for what the user can mend, 130 Ctrl-C."""
    if sys.stdout is None:  # closed by the shell, as in `memlab models >&-`
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        code = app(prog_name="memlab", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # `memlab models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        sys.exit(_fail(f"{error.filename}: {error.strerror}" if error.filename else str(error)))
    except ValueError as error:
        sys.exit(_fail(str(error)))
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, known by name: torch may not be loaded
            hint = "Without --gpu the whole step is traced, whatever it takes."
            sys.exit(_fail(f"{str(error).rstrip('.')}. {hint}", code=1))
        # Errors of the command line itself; typer may bring its own click, so they are known by what they do.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        sys.exit(_fail(message()))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> int:
    print("memlab: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
