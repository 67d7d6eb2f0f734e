"""`dovetail bench serve`: load on any OpenAI-compatible server, with vLLM's flags and result keys.

In: a URL, a dataset, one rate or several. Out: a table, JSON, and curves over the rates as PNG.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from dovetail.cli.options import AsJson
from dovetail.cli.report import print_json, report_errors, stdout_console, writing
from dovetail.errors import SpecError
from dovetail.ir.files import write_whole

RECORDED = "trace"
"""The rate that sends requests when the trace says."""


@report_errors
def serve_bench_command(
    more_bounds: Annotated[
        list[str] | None, typer.Argument(hidden=True, help="What follows --goodput, as in vLLM.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="The server, default by host and port.")
    ] = None,
    host: Annotated[str, typer.Option(help="Its address, where no URL is given.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8000,
    backend: Annotated[
        str, typer.Option(help="openai (vllm is the same), or openai-chat.")
    ] = "openai",
    endpoint: Annotated[
        str | None, typer.Option(help="Path of requests, default the backend's.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Id of the model, default the server's first.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server.", envvar="OPENAI_API_KEY")
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, sharegpt (like it), azure, mooncake, burstgpt, custom.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="File of a trace or custom one.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 100,
    request_rate: Annotated[
        list[str] | None,
        typer.Option(help="Requests per second, inf, or `trace` as recorded; repeatable."),
    ] = None,
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: bursts.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests under way at most.")] = None,
    random_input_len: Annotated[int, typer.Option(help="Tokens of random prompts.")] = 128,
    random_output_len: Annotated[int, typer.Option(help="Tokens of answers.")] = 32,
    random_range_ratio: Annotated[float, typer.Option(help="Random lengths vary so far.")] = 0.0,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Bounds in ms: ttft:500 tpot:50 e2el:3000.")
    ] = None,
    metric_percentiles: Annotated[str, typer.Option(help="Such as 50,90,99.")] = "99",
    percentile_metrics: Annotated[
        str, typer.Option(help="Metrics that the table shows.")
    ] = "ttft,tpot,itl,e2el",
    seed: Annotated[int, typer.Option(help="Seed of lengths, prompts and arrivals.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Run to the limit.")] = False,
    save_result: Annotated[
        bool,
        typer.Option("--save-result", help="Write a JSON file, a list where rates are several."),
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder of that file.")] = Path(),
    result_filename: Annotated[
        str | None, typer.Option(help="Its name, default of backend, rates, model and date.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw latency and SLO attainment over the rates, as PNG.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Send requests at a rate, and tell throughput, latencies and goodput."""
    from dovetail.cli.serve_load import LoadSpec, plan_load

    try:
        from dovetail.cli.serve_client import ENDPOINTS, Target, ask_model, run_load, summarize
    except ModuleNotFoundError as error:
        raise SpecError(f"this needs {error.name}; install dovetail with `bench`") from None

    if backend not in ENDPOINTS:
        raise SpecError(f"no backend {backend!r}; there is {', '.join(ENDPOINTS)}")
    if more_bounds and not goodput:
        raise SpecError(f"{more_bounds[0]!r} is no flag; only bounds of --goodput go without one")
    bounds = _read_bounds([*(goodput or []), *(more_bounds or [])])
    percentiles, base_url = _read_numbers(metric_percentiles), base_url or f"http://{host}:{port}"
    rates = [_read_rate(text) for text in request_rate or ["inf"]]
    name, context = ask_model(base_url, model, api_key)
    target = Target(
        base_url=base_url,
        model=name,
        backend=backend,
        endpoint=endpoint,
        api_key=api_key,
        ignore_eos=ignore_eos,
        max_concurrency=max_concurrency,
    )
    spec = LoadSpec(
        dataset=dataset_name,
        path=dataset_path,
        count=num_prompts,
        burstiness=burstiness,
        input_tokens=random_input_len,
        output_tokens=random_output_len,
        range_ratio=random_range_ratio,
        seed=seed,
    )
    results = []
    for rate in rates:
        planned = plan_load(replace(spec, rate=rate), context)
        timings, seconds = asyncio.run(run_load(target, planned))
        results.append(
            {
                "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
                "backend": backend,
                "model_id": name,
                "dataset_name": dataset_name,
                "num_prompts": len(planned),
                "request_rate": _show_rate(rate),
                "burstiness": burstiness,
                "max_concurrency": max_concurrency,
                **summarize(timings, seconds, bounds, percentiles),
                "errors": sorted({t.error for t in timings if t.error is not None})[:5],
            }
        )
    shown = results[0] if len(results) == 1 else results
    if save_result:
        path = result_dir / (result_filename or _name_file(results))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.format(msgspec.json.encode(shown), indent=2))
    if plot is not None:
        draw_curves(results, plot)
    if json:
        print_json(shown)
    else:
        _print(results, percentile_metrics.split(","), percentiles)


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
        if name not in METRICS or name == "itl":
            raise SpecError(
                f"--goodput {text!r} must be ttft, tpot, e2el or per_token, and ms: ttft:500"
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


def _print(
    results: Sequence[dict[str, Any]], metrics: Sequence[str], percentiles: Sequence[float]
) -> None:
    rows = ["completed", "failed", "request_throughput", "request_goodput", "slo_attainment"]
    rows += ["output_throughput", "total_token_throughput"]
    kinds = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    rows += [f"{kind}_{metric}_ms" for metric in metrics for kind in kinds]
    table = Table(title=f"{results[0]['model_id']}, {results[0]['dataset_name']}")
    table.add_column("requests/s")
    for result in results:
        table.add_column(str(result["request_rate"]), justify="right")
    for row in rows:
        values = [result.get(row) for result in results]
        if any(value is not None for value in values):
            table.add_row(row, *("" if value is None else f"{value:.6g}" for value in values))
    console = stdout_console()
    console.print(table)
    for error in {error for result in results for error in result["errors"]}:
        console.print(f"failed: {error}", markup=False)


def draw_curves(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw latency per output token (NEO Fig. 6) and SLO attainment (Sandwich Fig. 9) over rates.

    Raises SpecError where the rates are no numbers.
    """
    rates = [result["request_rate"] for result in results]
    if not all(isinstance(rate, float) for rate in rates):
        raise SpecError("--plot needs rates that are numbers: --request-rate 1 --request-rate 2")
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
