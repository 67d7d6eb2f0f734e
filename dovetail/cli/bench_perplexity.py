"""`dovetail bench perplexity`: how well a model foretells a text, and how fast it reads it.

In: an artifact, a model directory or a GGUF file, and a text file. Out: perplexity with its
standard error, as llama.cpp's `llama-perplexity` measures it: the text is cut into windows without
overlap; the second half of each is scored, given all that is before it in its window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.options import Activations, ArtifactOrModel, AsJson, Threads, Trust
from dovetail.cli.report import progress_bars, show_count, show_report
from dovetail.errors import RequestError, SpecError

if TYPE_CHECKING:
    from dovetail.runtime.app import App


LEAST_CONTEXT = 4


@dataclass(frozen=True, slots=True)
class Perplexity:
    """What a text came to. `context` tokens are a window, and windows begin so far apart.

    standard_error: of the perplexity, from the spread of the log probabilities.
    """

    perplexity: float
    standard_error: float
    mean_logprob: float
    scored_tokens: int
    tokens: int
    windows: int
    context: int


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """What `bench perplexity --json` prints; seconds and rate of reading all windows."""

    model: str
    text: str
    result: Perplexity
    seconds: float
    tokens_per_second: float


def perplexity_command(
    model: ArtifactOrModel,
    file: Annotated[Path, typer.Argument(help="A text file, UTF-8.")],
    context: Annotated[
        int | None,
        typer.Option(
            min=4, help="Tokens per window; default 512, or less if the context is smaller."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of the text to read.")
    ] = None,
    threads: Threads = None,
    activations: Activations = "integer",
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Measure a text's perplexity over the second halves of consecutive windows."""
    from dovetail.cli.model_cache import find_artifact
    from dovetail.loading import load

    text = _read(file)
    with load(
        find_artifact(model, {}), threads=threads, activations=activations, trust=trust
    ) as app:
        length = context or min(512, app.engine.spec.max_context)
        windows = cut_windows(app, text, length, max_tokens)
        begun = time.perf_counter()
        with progress_bars(quiet=json) as bar:
            found = measure_perplexity(app, windows, partial(bar, "scoring windows"))
        seconds = time.perf_counter() - begun
    report = PerplexityReport(model, str(file), found, seconds, found.tokens / seconds)
    show_report(report, _describe, json=json)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 text ({error.reason} at {error.start})") from None


def _describe(report: PerplexityReport) -> str:
    found = report.result
    return (
        f"perplexity {found.perplexity:.4f} +/- {found.standard_error:.4f}\n"
        f"{found.scored_tokens} tokens scored: the second halves of "
        f"{show_count(found.windows, 'consecutive window')} of {found.context}\n"
        f"{report.tokens_per_second:.0f} tokens/s, {report.seconds:.1f} s"
    )


def cut_windows(
    app: App, text: str, context: int, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the windows of `context` tokens that the first `max_tokens` of a text fill.

    Where the tokenizer puts a begin token before texts, it takes the first place of each window.
    Raises RequestError where the text does not fill a window, or the artifact has no tokenizer.
    """
    if app.tokenizer is None:
        raise RequestError(f"{app.artifact.path} has no tokenizer, so a text cannot be scored")
    tokens = app.tokenizer.encode(text, special=False)[:max_tokens]
    if not LEAST_CONTEXT <= context <= len(tokens):
        least, most = LEAST_CONTEXT, len(tokens)
        other = f", or a context from {least} to {most}" if most >= least else ""
        raise RequestError(
            f"{most} tokens do not fill a window of {context}; give a longer text{other}"
        )
    begin = app.tokenizer.encode("")[:1]
    begin = begin if begin == [app.engine.spec.bos_token_id] else []
    starts = range(0, len(tokens) - context + 1, context)
    return [begin + tokens[start + len(begin) : start + context] for start in starts]


def measure_perplexity(
    app: App,
    windows: Sequence[Sequence[int]],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Return the perplexity of the second halves of windows of equal length.

    `show` is told how many are done. Raises what `App.score` does.
    """
    context, found = len(windows[0]), list[float]()
    for done, window in enumerate(windows):
        show(done, len(windows))
        (score,) = app.score(window)
        found += [one for one in score.logprobs[context // 2 + 1 :] if one is not None]
    show(len(windows), len(windows))
    scored = len(found)
    mean = math.fsum(found) / scored
    spread = math.fsum((one - mean) ** 2 for one in found) / scored
    perplexity = math.exp(-mean)
    return Perplexity(
        perplexity=perplexity,
        standard_error=perplexity * math.sqrt(spread / max(1, scored - 1)),
        mean_logprob=mean,
        scored_tokens=scored,
        tokens=len(windows) * context,
        windows=len(windows),
        context=context,
    )
