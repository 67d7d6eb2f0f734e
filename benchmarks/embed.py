"""Embedding: throughput against peers, and within an SLO what the CPU adds to an accelerator.

Run `python benchmarks/embed.py APP.dove --models DIR --json F` (about 15 minutes). The accelerator
of the parts `device` and `device-load` is one of torch's (`--device`); `torch:cpu` is torch on CPUs
that our kernels do not use, `cpu` none. Without an artifact or models the parts that need them are
left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Report, add_report_options, open_report, parse_numbers, print_rows, show
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.embed.drift import DriftKeeper
from dovetail.runtime.embed.encoder import artifact_source, open_encoder
from dovetail.runtime.embed.fit_latency import Calibrator, Sample, profile_lines
from dovetail.runtime.embed.line import Line
from dovetail.runtime.embed.open import make_sample
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.sim.capacity import (
    Capacity,
    measure_artifact,
    serve_devices,
)
from dovetail.topology.hardware import read_hardware
from embed_load import manager_overhead, overload
from embed_models import MODELS
from embed_throughput import summarize_throughput, throughput_rows
from published_pairs import LENGTH, PAIRS, SLOS, core_rows, length_rows, table_rows

PARTS = ("throughput", "table3", "published", "overhead", "device", "device-load", "curves")
NEEDS = dict.fromkeys(("device", "device-load", "curves"), "artifact") | {"throughput": "models"}
"""Parts that are left out without this option."""
ROWS_OF = {"published5": "published", "published6": "published", "fig5": "curves", "fig6": "curves"}
"""Rows that are called otherwise than their part."""
CURVE_LENGTHS = (16, 75, 150, 300, 500)
DISTINCT = 16
"""Different queries of the load test."""
OVERLOAD = 10.0
"""Arrivals of the load test, by the capacity."""


def published_rows(part: str) -> list[dict[str, Any]]:
    """Return Table III as reproduced, or the curves of the published pairs."""
    if part == "table3":
        return [
            {"part": part, "pair": p.name, **row} for p in PAIRS.values() for row in table_rows(p)
        ]
    return [
        {"part": "published5" if figure is length_rows else "published6", **asdict(row)}
        for pair in PAIRS.values()
        for figure in (length_rows, core_rows)
        for row in figure(pair)
    ]


def device_rows(
    artifact: Path, slos: Sequence[float], repeats: int, threads: int | None, device: str
) -> list[dict[str, Any]]:
    """Return what the CPU adds to a torch device within each SLO."""
    options: dict[str, Any] = {"repeats": repeats, "threads": threads, "device": device}
    return [
        {"part": "device"} | capacity_row(measure_artifact(artifact, LENGTH, slo, **options))
        for slo in slos
    ]


def device_load_rows(
    artifact: Path, slo: float, seconds: float, threads: int | None, device: str
) -> list[dict[str, Any]]:
    """Return what open arrivals at ten times the capacity of a torch device and CPU come to."""
    keeper = DriftKeeper()
    options: dict[str, Any] = {"threads": threads, "device": device, "observe": keeper}
    with serve_devices(artifact, LENGTH, slo, **options) as (calibrator, accelerator):
        row = overload_row(calibrator, keeper, slo, seconds)
    return [{"part": "device-load", "accelerator": accelerator, **row}]


def capacity_row(found: Capacity) -> dict[str, Any]:
    """Return a capacity as a flat row."""
    row = asdict(found)
    for name, line in row.pop("lines").items():
        row |= {f"{name}_alpha": line["alpha"], f"{name}_beta": line["beta"]}
    return row


def overload_row(
    calibrator: Calibrator, keeper: DriftKeeper, slo: float, seconds: float
) -> dict[str, Any]:
    """Size the queues of devices, offer ten times their capacity, and return what came of it."""
    depths = calibrator.size_queues((LENGTH,), slo, "open", stress=False)
    closed = {
        name: classes[0].line.depth(slo, "closed") for name, classes in depths.devices.items()
    }
    capacity = sum(
        closed[name] / classes[0].line.seconds(closed[name])
        for name, classes in depths.devices.items()
        if closed[name]
    )
    if not capacity:
        return {"slo": slo, "length": LENGTH, "capacity": 0.0}
    keeper.keep(calibrator.service, calibrator.plan, depths)
    queries = calibrator.sample(DISTINCT, LENGTH)
    found = overload(calibrator.service, queries, OVERLOAD * capacity, seconds)
    found["of_capacity"] = found["accepted_per_second"] / capacity
    return {"slo": slo, "length": LENGTH, "capacity": capacity, **found}


def curve_rows(artifact: Path, slos: Sequence[float], cores: Sequence[int]) -> list[dict[str, Any]]:
    """Return Fig. 5 and 6 on this machine: closed depths by the lines, over lengths and threads."""
    rows, opened = [], open_artifact(artifact, read_hardware())
    with closing(open_encoder(str(artifact), 1)) as encoder:
        most, sample = encoder.spec.max_tokens, make_sample(encoder.spec)
    lengths = sorted({min(length, most) for length in CURVE_LENGTHS})
    cells = [("fig5", length, max(cores)) for length in lengths]
    cells += [("fig6", LENGTH, count) for count in cores]
    for figure, length, count in cells:
        with closing(ProcessInstance(artifact_source(opened, count))) as cpu:
            line = time_instance(cpu, sample, length, min(slos))
        rows += [
            {"part": figure, "slo": slo, "length": length, "cores": count}
            | {"cpu": line.depth(slo, "closed")}
            for slo in slos
        ]
    return rows


def time_instance(instance: ProcessInstance, sample: Sample, length: int, slo: float) -> Line:
    """Return the line of an instance that nobody else uses."""

    def measure(counts: Mapping[str, int]) -> dict[str, float]:
        asked = sample(counts["cpu"], length)
        start = time.perf_counter()
        instance.embed_tokens(asked)
        return {"cpu": time.perf_counter() - start}

    return profile_lines(measure, ["cpu"], slo)["cpu"].line


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the issue, as far as their parts were run."""
    found = summarize_throughput(rows)
    table = [row for row in rows if row["part"] == "table3"]
    if table:
        found["table3_off_by"] = max(abs(row["off_by"]) for row in table)
    for row in rows:
        if row["part"] == "device":
            for name in ("gain", "cpu_share", "depth_error"):
                found[f"device_{name}_{row['slo']:g}s"] = row[name]
        if row["part"] == "device-load" and row["capacity"]:
            for name in ("p99", "p99_warm", "of_capacity", "busy_p99_ms"):
                found[f"device_load_{name}_{row['slo']:g}s"] = row[name]
        if row["part"] == "overhead":
            found["manager_overhead_ms"] = row["manager_ms"]
    return found


def print_parts(report: Report) -> None:
    """Print a table for each part, and the summary."""
    for part in dict.fromkeys(row["part"] for row in report.rows):
        rows = [
            {name: value for name, value in row.items() if name != "part"}
            for row in report.rows
            if row["part"] == part
        ]
        print_rows(part, rows)
    for name, value in report.summary.items():
        print(f"{name:32} {show(value)}")


def run_part(
    part: str,
    options: argparse.Namespace,
    done: Sequence[dict[str, Any]],
) -> Iterable[list[dict[str, Any]]]:
    """Return the rows of one part that are not among those `done`, in lists to be kept at once."""
    if part == "throughput":
        threads = options.threads or max(options.cores)
        rows = throughput_rows(options.only_models, options.models, threads, options.cell, done)
        return ([row] for row in rows)
    if any(ROWS_OF.get(row["part"], row["part"]) == part for row in done):
        return ()
    if part in ("table3", "published"):
        return [published_rows(part)]
    if part == "overhead":
        return [[{"part": part, **manager_overhead()}]]
    if part == "device":
        given = options.slo, options.repeats, options.threads, options.device
        return [device_rows(options.artifact, *given)]
    if part == "device-load":
        given = options.seconds, options.threads, options.device
        return (device_load_rows(options.artifact, slo, *given) for slo in options.slo)
    return [curve_rows(options.artifact, options.slo, options.cores)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen parts, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("artifact", type=Path, nargs="?", help="an encoder's artifact")
    parser.add_argument("--models", type=Path, metavar="DIR", help="files of the throughput part")
    parser.add_argument("--only-models", nargs="*", choices=MODELS, default=["minilm", "bge-large"])
    parser.add_argument("--cell", type=float, default=15.0, help="seconds of a throughput cell")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--slo", type=float, nargs="*", default=SLOS, help="seconds")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a stress trial")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the load test")
    parser.add_argument("--threads", type=int, help="of the CPU instance, default as planned")
    parser.add_argument("--device", default="auto", help="of torch: auto, cpu, cuda:1, torch:cpu")
    most = read_hardware().usable_threads
    parser.add_argument("--cores", type=parse_numbers, default=tuple(range(1, most + 1)))
    add_report_options(parser)
    options = parser.parse_args(arguments)
    parts = [p for p in options.only if p not in NEEDS or getattr(options, NEEDS[p]) is not None]
    config = {
        "artifact": options.artifact.name if options.artifact else None,
        "slo": list(options.slo),
        "length": LENGTH,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "threads": options.threads,
        "device": options.device,
    }
    report: Report = open_report("embed", options, config, ("artifact", "length", "threads"))
    report.summary = summarize(report.rows)
    for part in parts:
        for rows in run_part(part, options, tuple(report.rows)):
            report.rows += rows
            report.summary = summarize(report.rows)
            report.write(options.json)
    print_parts(report)


if __name__ == "__main__":
    main()
