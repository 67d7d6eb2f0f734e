"""`dovetail bench perplexity`: how well a model foretells a text, and how fast it reads it.

In: an artifact, a model directory or a GGUF file, and a text file. Out: perplexity with its
standard error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.options import Activations, AsJson, Threads, Trust
from dovetail.cli.report import print_json, progress_bars, report_errors
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.runtime.perplexity import Perplexity


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """What `bench perplexity --json` prints; seconds and rate of reading all windows."""

    model: str
    text: str
    result: Perplexity
    seconds: float
    tokens_per_second: float


@report_errors
def perplexity_command(
    model: Annotated[Path, typer.Argument(help="An artifact, a model directory or a GGUF file.")],
    file: Annotated[Path, typer.Argument(help="A text file, UTF-8.")],
    context: Annotated[
        int | None, typer.Option(min=4, help="Tokens of a window, default 512 or the model's.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Read no more tokens of the text than these.")
    ] = None,
    threads: Threads = None,
    activations: Activations = "integer",
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Score the second halves of windows of a text that follow each other without overlap."""
    from dovetail.cli.model_cache import find_artifacts
    from dovetail.loading import load
    from dovetail.runtime.perplexity import cut_windows, measure_perplexity

    text = _read(file)
    (artifact,) = find_artifacts([str(model)], [], {}).values()
    with load(artifact, threads=threads, activations=activations, trust=trust) as app:
        length = context or min(512, app.engine.spec.max_context)
        windows = cut_windows(app, text, length, max_tokens)
        begun = time.perf_counter()
        with progress_bars(quiet=json) as bar:
            found = measure_perplexity(app, windows, partial(bar, "scoring windows"))
        seconds = time.perf_counter() - begun
    report = PerplexityReport(str(model), str(file), found, seconds, found.tokens / seconds)
    if json:
        print_json(report)
    else:
        _print(report)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 text ({error.reason} at {error.start})") from None


def _print(report: PerplexityReport) -> None:
    found = report.result
    print(f"perplexity {found.perplexity:.4f} +/- {found.standard_error:.4f}")
    print(
        f"{found.scored_tokens} tokens scored: the second halves of {found.windows} windows of "
        f"{found.context}, one after the other"
    )
    print(f"{report.tokens_per_second:.0f} tokens/s, {report.seconds:.1f} s")
