"""`dovetail compile`: a model directory to an artifact, with a bar and an ETA for each step.

In: a Hugging Face directory and what to plan for. Out: an artifact, and a report of decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.options import (
    Adapters,
    AsJson,
    Beside,
    CompileFlags,
    Indexes,
    KernelFlags,
    Mixed,
    SearchFlags,
    Workflows,
    read_named,
)
from dovetail.cli.report import progress_bars, show_bytes, show_report

if TYPE_CHECKING:
    from dovetail.compiler.plan.end_to_end import EndToEnd
    from dovetail.compiler.write.report import CompileReport


def compile_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face directory, a GGUF file or a hub id; or an artifact to compile "
            "again."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Artifact directory to write.")],
    beside: Beside = None,
    adapter: Adapters = None,
    target: Annotated[
        list[str] | None, "Instruction set to build for, or cuda; repeatable."
    ] = None,
    effort: Annotated[
        str,
        "Search of schedules: none (default schedules), fast (a minute) or full (some minutes).",
    ] = "fast",
    *,
    search: SearchFlags,
    compiling: CompileFlags,
    own: KernelFlags,
    workflow: Workflows = None,
    index: Indexes = None,
    mix: Mixed = None,
    json: AsJson = False,
) -> None:
    """Compile a model for a machine into one artifact; a failed compile writes nothing."""
    from dovetail.cli.workflow_files import find_workflow
    from dovetail.compiler.models.hub import find_adapters, find_model, find_models
    from dovetail.compiler.pipeline import compile_model
    from dovetail.compiler.write.writer import check_output

    check_output(output)
    found = find_model(model)  # with bars of its own
    named = find_models(read_named("--model", beside or ()))
    adapters = find_adapters(read_named("--adapter", adapter or ()))
    with progress_bars() as progress:
        report = compile_model(
            found,
            output=output,
            progress=progress,
            beside=named,
            adapters=adapters,
            targets=tuple(target or ()),
            effort=effort,
            **search.fields(),
            **vars(compiling),
            workflows=[find_workflow(text) for text in workflow or ()],
            index=index,
            mix=mix,
            **own.fields(),
        )
    show_report(report, describe_report, json=json)


def describe_report(report: CompileReport) -> str:
    """Return the lines a person reads after a compile."""
    return "\n".join(_describe(report))


def _describe(report: CompileReport) -> Iterator[str]:
    rows = ", ".join(f"{count} {source}" for source, count in report.rows.items())
    yield (
        f"{report.path}: {report.family}, {show_bytes(report.weight_bytes)} of "
        f"{report.weight_dtype} weights, {report.kv_dtype} KV, context {report.max_context}"
    )
    for encoder in report.encoders:
        yield (
            f"{encoder.name}: {encoder.family}, {show_bytes(encoder.weight_bytes)} of "
            f"{encoder.weight_dtype} weights, texts of {encoder.max_tokens} tokens"
        )
    yield f"{report.kernels} kernels for {', '.join(report.targets)}; schedule rows: {rows}"
    yield f"plan: {report.plan}"
    if (gain := report.gain) is not None:
        yield (
            f"search: {report.trials} trials, {report.trials - report.measured} of them from the "
            f"database; matrix products {gain.ratio:.2f}x as fast as with the default schedules "
            f"(quartiles {gain.low:.2f} to {gain.high:.2f})"
        )
    if (found := report.end_to_end) is not None:
        yield from _describe_end_to_end(found)
    for what, names in (("workflows", report.workflows), ("indexes", report.indexes)):
        if names:
            yield f"{what}: {', '.join(names)}"
    yield "seconds: " + ", ".join(f"{step} {s:.1f}" for step, s in report.seconds.items())
    yield from (f"note: {note}" for note in report.notes)


def _describe_end_to_end(found: EndToEnd) -> Iterator[str]:
    for phase, gain in (("prefill", found.prefill), ("decode", found.decode)):
        if gain is not None:
            sure = f"surely {gain.least:.2f}x"
            yield (
                f"{phase}: {gain.before:.1f} tokens/s with default schedules, {gain.after:.1f} "
                f"with those found ({gain.gain:.2f}x, "
                f"{sure if gain.kept else 'not surely faster: the default serves'})"
            )
    yield f"end to end: {found.note}"
