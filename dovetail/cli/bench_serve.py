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
from rich.table import Table

from dovetail.cli.options import AsJson
from dovetail.cli.report import CHECK_FAILED, make_table, show_report, writing
from dovetail.cli.serve_load import ENDPOINTS, LoadSpec, Target, plan_load, read_load_tokenizer
from dovetail.errors import SpecError
from dovetail.ir.errors import install
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

    if target.backend not in ENDPOINTS:
        raise SpecError(f"no backend {target.backend!r}; choose one of {', '.join(ENDPOINTS)}")
    if more_bounds and not results.goodput:
        raise SpecError(
            f"unexpected argument {more_bounds[0]!r}; only limits of --goodput need no option name"
        )
    bounds = _read_bounds([*(results.goodput or []), *(more_bounds or [])])
    metrics, percentiles = _read_metrics(results)
    rates = [None if rate == RECORDED else _read_number(rate) for rate in request_rate or ["inf"]]
    if results.plot is not None:
        _check_plot(rates)
    tokenizer = None if load.tokenizer is None else read_load_tokenizer(load.tokenizer)
    name, context = ask_model(target)
    target = replace(target, model=name)
    plans = [plan_load(replace(load, rate=rate), context, tokenizer) for rate in rates]
    found = []
    for rate, planned in zip(rates, plans, strict=True):
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
                "request_rate": {None: RECORDED, math.inf: "inf"}.get(rate, rate),
                "burstiness": load.burstiness,
                "max_concurrency": target.max_concurrency,
                **summarize(timings, seconds, bounds, percentiles),
                "errors": sorted({t.error for t in timings if t.error is not None})[:5],
            }
        )
    shown = found[0] if len(found) == 1 else found
    show_report(shown, lambda _: _describe(found, metrics, percentiles), json=json)
    _keep_results(results, found, shown)
    if not any(result["completed"] for result in found):
        raise typer.Exit(CHECK_FAILED)


def _read_metrics(results: ResultFlags) -> tuple[list[str], list[float]]:
    """Return the metrics that the table shows, and the percentiles to compute."""
    from dovetail.cli.serve_client import METRICS

    percentiles = [_read_number(text) for text in results.metric_percentiles.split(",")]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise SpecError(f"--metric-percentiles {results.metric_percentiles} must be from 0 to 100")
    metrics = results.percentile_metrics.split(",")
    if unknown := ", ".join(sorted({*metrics} - {*METRICS})):
        raise SpecError(f"--percentile-metrics has no {unknown}; choose of {', '.join(METRICS)}")
    return metrics, percentiles


def _keep_results(results: ResultFlags, found: Sequence[dict[str, Any]], shown: object) -> None:
    """Write the files that were asked for."""
    if results.save_result:
        path = results.result_dir / (results.result_filename or _name_file(found))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.format(msgspec.json.encode(shown), indent=2))
    if results.plot is not None:
        with writing(results.plot):
            draw_curves(found, results.plot)


def _check_plot(rates: Sequence[float | None]) -> None:
    """Raise SpecError for what no curve can be drawn with or of, before anything is sent."""
    if find_spec("matplotlib") is None:
        raise SpecError(f"--plot needs matplotlib: {install('bench')}")
    if not all(rate is not None and math.isfinite(rate) for rate in rates):
        raise SpecError("--plot needs numeric rates, such as --request-rate 1 --request-rate 2")


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
        bounds[name] = _read_number(number)
    return bounds


def _read_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise SpecError(f"{text!r} must be a number, such as 99")
    return number


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
        yield f"failed: {error}"


def draw_curves(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw latency per token (NEO Fig. 6) and SLO attainment (Sandwich Fig. 9) over rates."""
    from matplotlib.figure import Figure

    rates = [result["request_rate"] for result in results]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(rates, [result["mean_per_token_ms"] for result in results], marker="o")
    left.set(xlabel="requests/s", ylabel="ms per output token", ylim=(0, None))
    if results[0]["slo_attainment"] is not None:
        right.plot(rates, [result["slo_attainment"] for result in results], marker="o")
        right.axhline(0.9, linestyle=":", color="grey")
    right.set(xlabel="requests/s", ylabel="SLO attainment", ylim=(0, 1.05))
    figure.savefig(path, format="png", dpi=120)
