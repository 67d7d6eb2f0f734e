"""How verbs declare options, and those that several verbs share.

In: a verb whose parameters are `Annotated[type, "help text"]`, or groups: dataclasses of such
fields. Out: a function that typer reads, with one option for each parameter and field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from dovetail.cli.report import read_duration
from dovetail.errors import SpecError


def declare_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with an option in the place of each help text and of each field of a group.

    A group's `PANEL` is the panel of its options in `--help`; fields without a help text are none.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = [], {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and is_dataclass(kind):
            own, panel = get_type_hints(kind, include_extras=True), getattr(kind, "PANEL", None)
            found = [
                _option(field.name, own[field.name], field.default, panel)
                for field in fields(kind)
                if hasattr(own[field.name], "__metadata__")
            ]
            parameters += found
            groups[name] = kind, [option.name for option in found]
        else:
            parameters.append(_option(name, kind, parameter.default))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{option: given.pop(option) for option in options})
            for name, (kind, options) in groups.items()
        }
        command(**given, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(name: str, kind: Any, default: Any, panel: str | None = None) -> inspect.Parameter:
    """Return a parameter as typer reads it; switches are on or off by one flag, --NAME."""
    plain, *notes = get_args(kind) if hasattr(kind, "__metadata__") else (kind,)
    if notes and isinstance(notes[0], str):
        flags = () if default is True else (flag_of(name),)
        kind = Annotated[plain, typer.Option(*flags, help=notes[0], rich_help_panel=panel)]
    elif panel is not None:
        note = copy(notes[0])
        note.rich_help_panel = panel
        kind = Annotated[plain, note]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def flag_of(name: str) -> str:
    """Return how the option for a parameter is written."""
    return "--" + name.replace("_", "-")


Activations = Annotated[
    str, "Activations beside quantised weights: integer (rounded to 8 bits) or float."
]


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """How an engine runs; the names are those of `load`."""

    PANEL = "Engine"

    device: Annotated[
        str,
        "Where to compute: auto (an accelerator if found), cpu, cuda, cuda:1, xpu, npu, torch:cpu.",
    ] = "auto"
    offload: Annotated[
        str,
        "Requests of an accelerator that the CPU computes: auto (if faster), off or full (all).",
    ] = "auto"
    dtype: Annotated[str, "Type of activations on an accelerator: auto, f32, bf16 or f16."] = "auto"
    gpu_memory_utilization: Annotated[
        float, "Fraction of the accelerator's free memory to use."
    ] = 0.9
    gpu_blocks: Annotated[
        int | None,
        "Size of the accelerator's KV pool, in blocks of 16 tokens; default by memory.",
    ] = None
    max_num_seqs: Annotated[int | None, "Maximum sequences per step; default by memory."] = None
    max_num_batched_tokens: Annotated[int | None, "Maximum tokens per step; default by memory."] = (
        None
    )
    max_model_len: Annotated[
        int | None, "Maximum tokens of a request, prompt and answer; default the model's context."
    ] = None
    threads: Annotated[int | None, "CPU threads; default as planned in the artifact."] = None
    deterministic: Annotated[
        bool, "Compute bit-identical results for any batch and number of threads (slower)."
    ] = False
    activations: Activations = "integer"
    speculative_config: Annotated[
        str | None,
        "JSON: draft tokens by looking them up in prompt and answer, as in "
        '{"method": "suffix", "num_speculative_tokens": 8}.',
    ] = None
    draft: Annotated[
        str | None,
        "Small model with the same vocabulary, or its artifact: it drafts tokens that the model "
        "verifies, several in a step.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class WeightFlags:
    """How weights and KV are stored, of a model that is compiled."""

    PANEL = "Compiling"

    weight_dtype: Annotated[
        str,
        "Type of stored weights: auto (as in the checkpoint if quantised; bf16 if the CPU has bf16 "
        "instructions or the checkpoint is bf16; else f32), f32, bf16, int8 or int4 (quantise).",
    ] = "auto"
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXTFILE",
            help="Text file like future inputs, to calibrate int8 or int4 weights with.",
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        "Type of stored keys and values: f32, bf16 or f16; default bf16, beside f32 weights f32.",
    ] = None

    def chosen(self) -> dict[str, Any]:
        """Return the options that are not at their defaults."""
        found = vars(self).items()
        return {name: value for name, value in found if value not in (None, "auto")}


@dataclass(frozen=True, kw_only=True)
class CompileFlags(WeightFlags):
    """The same, and the context."""

    max_context: Annotated[
        int | None, "Maximum tokens of a request that is planned for; default the model's context."
    ] = None


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """What schedules are searched for, and for how long; as fields of requests to the compiler."""

    PANEL = "Search of schedules"

    hardware: Annotated[
        str, "Machine to compile for: auto (this one), or a description as for `dovetail topo`."
    ] = "auto"
    workload: Annotated[
        Path | None, "Trace of prompt and output lengths to plan for, CSV or JSON lines."
    ] = None
    threads: Annotated[int | None, "CPU threads; default all cores."] = None
    budget: Annotated[
        str | None, "Maximum time for measurements, such as 60s, 15m, 1h; default by --effort."
    ] = None
    db: Annotated[Path | None, "Database of measurements; default in the build cache."] = None

    def fields(self) -> dict[str, Any]:
        """Return the options by their names in a request."""
        found = dict(vars(self))
        if self.budget is not None:
            found["budget"] = read_duration(self.budget)
        return {"database": found.pop("db"), **found}


PreludeOption = Annotated[
    list[Path] | None, "C text with macros and types that the file needs; repeatable."
]
IncludeOption = Annotated[
    list[Path] | None,
    typer.Option("-I", "--include", help="Folder of headers to include; repeatable."),
]


@dataclass(frozen=True, kw_only=True)
class KernelFlags:
    """Kernels of a user's own, and what stands around those that are C."""

    PANEL = "Kernels of your own"

    kernel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP=FILE",
            help="Kernel of your own (C or .dk) for an operator, to be measured beside ours; "
            "without OP= its kernels are added for dovetail.kernels; repeatable.",
        ),
    ] = None
    prelude: PreludeOption = None
    include: IncludeOption = None

    def fields(self) -> dict[str, Any]:
        """Return the options by their names in a request."""
        return {
            "kernels": tuple(self.kernel or ()),
            "prelude": tuple(self.prelude or ()),
            "include": tuple(self.include or ()),
        }


def read_named(flag: str, given: Iterable[str]) -> dict[str, str]:
    """Return directories by name, from NAME=DIRECTORY each."""
    named: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in named:
            raise SpecError(f"{flag} {text}: write NAME=DIRECTORY, each name once")
        named[name] = path
    return named


def beside_options(
    adapters: Iterable[str] | None, encoders: Iterable[str] | None
) -> dict[str, object]:
    """Return the options of a compile that has these beside a model; they may be of the hub."""
    from dovetail.compiler.models.hub import find_adapters, find_models

    found = {
        "adapter": find_adapters(read_named("--adapter", adapters or ())),
        "model": find_models(read_named("--model", encoders or ())),
    }
    return {
        option: tuple(f"{name}={path.absolute()}" for name, path in paths.items())
        for option, paths in found.items()
        if paths
    }


Adapters = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=DIRECTORY",
        help="LoRA adapter (or its hub id) that requests ask for by NAME, beside the model's own "
        "weights; repeatable.",
    ),
]
Beside = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME=DIRECTORY",
        help="Encoder (or its hub id) to put into the same artifact, such as the one that an index "
        "was built by; repeatable.",
    ),
]
ArtifactDirectory = Annotated[Path, typer.Argument(help="An artifact directory.")]
ArtifactOrModel = Annotated[
    str, typer.Argument(help="An artifact, a model directory, a GGUF file, or a hub id.")
]
Threads = Annotated[int | None, "CPU threads; default all cores."]
AsJson = Annotated[bool, "Print one JSON object."]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Do not warn before running code of an artifact or index that was not made here.",
        envvar="DOVETAIL_TRUST",
    ),
]
Workflows = Annotated[
    list[str] | None,
    "Workflow: *.py, *.json or *.yaml file, or one-shot, hyde, recomp, irg, multistep; these with "
    "-chat behind them (one-shot-chat) for a model trained to chat; repeatable.",
]
Indexes = Annotated[list[Path] | None, "Index folder that workflows search; repeatable."]
Mixed = Annotated[
    str | None,
    typer.Option(
        metavar="CHAT:RAG:EMBED",
        help="Expected load as CHAT:RAG:EMBED requests (for example 16:4:1); the CPU is divided "
        "for it.",
    ),
]
