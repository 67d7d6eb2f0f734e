"""`dovetail bench serve`: load on any OpenAI-compatible server, with vLLM's flags and result keys.

In: a URL, a dataset, one rate or several. Out: a table, JSON, and curves over the rates as PNG.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from dovetail.cli.options import AsJson
from dovetail.cli.report import make_table, show_report, writing
from dovetail.cli.serve_load import ENDPOINTS, LoadSpec, Target, plan_load, read_load_tokenizer
from dovetail.errors import SpecError
from dovetail.ir.files import write_whole

RECORDED = "trace"
"""The rate that sends requests when the trace says."""
SHOWN = (
    *("completed", "failed", "request_throughput", "request_goodput", "slo_attainment"),
    *("output_throughput", "total_token_throughput"),
)


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """What is computed of the timings, and where it goes."""

    PANEL = "Results"

    goodput: Annotated[
        list[str] | None, "Latency limits in ms: ttft:500 tpot:50 e2el:3000 per_token:60."
    ] = None
    metric_percentiles: Annotated[str, "Percentiles to compute, such as 50,90,99."] = "99"
    percentile_metrics: Annotated[str, "Metrics that the table shows."] = "ttft,tpot,itl,e2el"
    save_result: Annotated[bool, "Write a JSON file (a list if there are several rates)."] = False
    result_dir: Annotated[Path, "Directory of that file."] = Path()
    result_filename: Annotated[
        str | None, "Its name; default from backend, rates, model and date."
    ] = None
    plot: Annotated[
        Path | None, "Draw latency and SLO attainment over the rates in this PNG file."
    ] = None


def serve_bench_command(
    more_bounds: Annotated[
        list[str] | None, typer.Argument(hidden=True, help="What follows --goodput, as in vLLM.")
    ] = None,
    *,
    target: Target,
    load: LoadSpec,
    request_rate: Annotated[
        list[str] | None, "Requests per second, inf, or `trace` (as recorded); repeatable."
    ] = None,
    results: ResultFlags,
    json: AsJson = False,
) -> None:
    """Send requests to a server at given rates; report throughput, latency and goodput."""
    from dovetail.cli.serve_client import ask_model, count_answers, run_load, summarize

    if results.plot is not None and find_spec("matplotlib") is None:
        raise SpecError("--plot needs matplotlib; install dovetail with the extra `bench`")

    if target.backend not in ENDPOINTS:
        raise SpecError(f"no backend {target.backend!r}; choose one of {', '.join(ENDPOINTS)}")
    if more_bounds and not results.goodput:
        raise SpecError(
            f"unexpected argument {more_bounds[0]!r}; only limits of --goodput need no option name"
        )
    bounds = _read_bounds([*(results.goodput or []), *(more_bounds or [])])
    percentiles = _read_numbers(results.metric_percentiles)
    rates = [_read_rate(text) for text in request_rate or ["inf"]]
    tokenizer = None if load.tokenizer is None else read_load_tokenizer(load.tokenizer)
    name, context = ask_model(target)
    target = replace(target, model=name)
    found = []
    for rate in rates:
        planned = plan_load(replace(load, rate=rate), context, tokenizer)
        timings, seconds = asyncio.run(run_load(target, planned))
        if tokenizer is not None:
            count_answers(timings, lambda text: len(tokenizer.encode(text, special=False)))
        found.append(
            {
                "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
                "backend": target.backend,
                "model_id": name,
                "tokenizer_id": load.tokenizer or name,
                "dataset_name": load.dataset_name,
                "num_prompts": len(planned),
                "request_rate": _show_rate(rate),
                "burstiness": load.burstiness,
                "max_concurrency": target.max_concurrency,
                **summarize(timings, seconds, bounds, percentiles),
                "errors": sorted({t.error for t in timings if t.error is not None})[:5],
            }
        )
    _save(found, results)
    metrics = results.percentile_metrics.split(",")
    show_report(
        found[0] if len(found) == 1 else found,
        lambda _: _describe(found, metrics, percentiles),
        json=json,
    )


def _save(results: Sequence[dict[str, Any]], wanted: ResultFlags) -> None:
    """Write what `wanted` asks for: a JSON file, a plot."""
    if wanted.save_result:
        path = wanted.result_dir / (wanted.result_filename or _name_file(results))
        shown = results[0] if len(results) == 1 else results
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.format(msgspec.json.encode(shown), indent=2))
    if wanted.plot is not None:
        draw_curves(results, wanted.plot)


def _name_file(results: Sequence[dict[str, Any]]) -> str:
    """Return a name such as vLLM's: `openai-2.0qps-llama-20250131-101500.json`."""
    first = results[0]
    rates = "-".join(f"{result['request_rate']}qps" for result in results)
    model = str(first["model_id"]).rsplit("/", 1)[-1]
    return f"{first['backend']}-{rates}-{model}-{first['date']}.json"


def _read_bounds(texts: Sequence[str]) -> dict[str, float]:
    from dovetail.cli.serve_client import METRICS

    bounds: dict[str, float] = {}
    for text in " ".join(texts).split():
        name, _, number = text.partition(":")
        if name not in METRICS or name == "itl" or not number:
            raise SpecError(
                f"--goodput {text!r} must be ttft, tpot, e2el or per_token and ms, such as ttft:500"
            )
        bounds[name] = _read_numbers(number)[0]
    return bounds


def _read_numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SpecError(f"{text!r} must be numbers, such as 50,99") from None


def _read_rate(text: str) -> float | None:
    return None if text == RECORDED else _read_numbers(text)[0]


def _show_rate(rate: float | None) -> float | str:
    if rate is None:
        return RECORDED
    return "inf" if math.isinf(rate) else rate


def _describe(
    results: Sequence[dict[str, Any]], metrics: Sequence[str], percentiles: Sequence[float]
) -> Iterator[Table | str]:
    kinds = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    names = [*SHOWN, *(f"{kind}_{metric}_ms" for metric in metrics for kind in kinds)]
    rows = [(name, [result.get(name) for result in results]) for name in names]
    yield make_table(
        f"{results[0]['model_id']}, {results[0]['dataset_name']}",
        ("requests/s", *(f">{result['request_rate']}" for result in results)),
        [
            (name, *("" if value is None else f"{value:.6g}" for value in values))
            for name, values in rows
            if any(value is not None for value in values)
        ],
    )
    for error in {error for result in results for error in result["errors"]}:
        yield f"failed: {escape(error)}"


def draw_curves(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw latency per output token (NEO Fig. 6) and SLO attainment (Sandwich Fig. 9) over rates.

    Raises SpecError where the rates are no numbers.
    """
    rates = [result["request_rate"] for result in results]
    if not all(isinstance(rate, float) for rate in rates):
        raise SpecError("--plot needs numeric rates, such as --request-rate 1 --request-rate 2")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(rates, [result["mean_per_token_ms"] for result in results], marker="o")
    left.set(xlabel="requests/s", ylabel="ms per output token", ylim=(0, None))
    if results[0]["slo_attainment"] is not None:
        right.plot(rates, [result["slo_attainment"] for result in results], marker="o")
        right.axhline(0.9, linestyle=":", color="grey")
    right.set(xlabel="requests/s", ylabel="SLO attainment", ylim=(0, 1.05))
    figure.savefig(path, format="png", dpi=120)
