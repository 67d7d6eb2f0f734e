"""Embedding: throughput against peers, and within an SLO what the CPU adds to an accelerator.

Run `python benchmarks/embed.py APP.dove --models DIR --json F` (about 15 minutes). The CPU is
real, the accelerator *emulated*: the same vectors, on the wall clock by the paper's ratios to the
CPU measured in the run. The parts `device` and `device-load` have a real one, by torch's name of it
(`--device`); `torch:cpu` is torch on CPUs that our kernels do not use. Without an artifact or
models the parts that need them are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from common import Report, add_report_options, open_report, parse_numbers, rows_table, show
from dovetail.runtime.embedding.calibrate import Calibrator, DriftKeeper
from dovetail.runtime.embedding.capacity import (
    Capacity,
    Queries,
    device_pair,
    emulated_line,
    emulated_pair,
    measure_artifact,
    measure_device,
    time_instance,
)
from dovetail.runtime.embedding.detector import EmbeddingPlan
from dovetail.runtime.embedding.instance import EncoderSource
from dovetail.runtime.embedding.line import Line
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.service import EmbeddingService
from dovetail.runtime.embedding.source import artifact_source, open_encoder
from dovetail.runtime.sim.pairs import LENGTH, PAIRS, SLOS, core_rows, length_rows, table_rows
from dovetail.topology.hardware import read_hardware
from embed_load import manager_overhead, overload
from embed_models import MODELS
from embed_throughput import summarize_throughput, throughput_rows

REAL = ("device", "device-load")
"""Parts with a torch device as accelerator."""
PARTS = ("throughput", "table3", "published", "overhead", "concurrency", "load", "curves", *REAL)
NEEDS = dict.fromkeys(("concurrency", "load", "curves", *REAL), "artifact")
NEEDS |= {"throughput": "models"}
"""Parts that are left out without this option."""
ROWS_OF = {"published5": "published", "published6": "published", "fig5": "curves", "fig6": "curves"}
"""Rows that are called otherwise than their part."""
CURVE_LENGTHS = (16, 75, 150, 300, 500)
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


def concurrency_rows(
    artifact: Path, slos: Sequence[float], repeats: int, threads: int | None
) -> list[dict[str, Any]]:
    """Return what the CPU adds within each SLO, stress-tested beside the emulated accelerator."""
    return [
        {"part": "concurrency"}
        | capacity_row(measure_artifact(artifact, LENGTH, slo, repeats=repeats, threads=threads))
        for slo in slos
    ]


def device_rows(
    artifact: Path, slos: Sequence[float], repeats: int, threads: int | None, device: str
) -> list[dict[str, Any]]:
    """Return what the CPU adds to a torch device within each SLO; says where there is none."""
    options: dict[str, Any] = {"repeats": repeats, "threads": threads, "device": device}
    found = [measure_device(artifact, LENGTH, slo, **options) for slo in slos]
    if None in found:
        print("device: left out: no accelerator embeds here; name one, such as torch:cpu")
    return [{"part": "device"} | capacity_row(each) for each in found if each is not None]


def device_load_rows(
    artifact: Path, slo: float, seconds: float, threads: int | None, device: str
) -> list[dict[str, Any]]:
    """Return what open arrivals at ten times the capacity of a torch device and CPU come to."""
    keeper = DriftKeeper()
    options: dict[str, Any] = {"threads": threads, "device": device, "observe": keeper}
    with device_pair(artifact, LENGTH, slo, **options) as pair:
        if pair is None:
            return []
        calibrator = Calibrator(pair.service, pair.plan, pair.queries.sample)
        row = overload_row(calibrator, pair.service, pair.plan, keeper, pair.queries, slo, seconds)
    return [{"part": "device-load", "accelerator": pair.accelerator, **row}]


def capacity_row(found: Capacity) -> dict[str, Any]:
    """Return a capacity as a flat row."""
    row = asdict(found)
    for name, line in row.pop("lines").items():
        row |= {f"{name}_alpha": line["alpha"], f"{name}_beta": line["beta"]}
    return row


def load_rows(
    source: EncoderSource, queries: Queries, slo: float, seconds: float
) -> list[dict[str, Any]]:
    """Return what open arrivals at ten times the capacity come to."""
    cpu = ProcessInstance(source)
    line = emulated_line(time_instance(cpu, queries.sample, LENGTH, slo).line)
    keeper = DriftKeeper()
    with emulated_pair(cpu, line, queries.of(LENGTH), LENGTH, slo=slo, observe=keeper) as (
        service,
        plan,
        _,
    ):
        calibrator = Calibrator(service, plan, queries.sample)
        row = overload_row(calibrator, service, plan, keeper, queries, slo, seconds)
    return [{"part": "load", **row}]


def overload_row(
    calibrator: Calibrator,
    service: EmbeddingService,
    plan: EmbeddingPlan,
    keeper: DriftKeeper,
    queries: Queries,
    slo: float,
    seconds: float,
) -> dict[str, Any]:
    """Size the queues of a pair, offer it ten times its capacity, and return what came of it."""
    depths, _ = calibrator.size_queues((LENGTH,), slo, "open", stress=False)
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
    keeper.keep(service, plan, depths)
    found = overload(service, queries.of(LENGTH), OVERLOAD * capacity, seconds)
    found["of_capacity"] = found["accepted_per_second"] / capacity
    return {"slo": slo, "length": LENGTH, "capacity": capacity, **found}


def curve_rows(
    artifact: Path, queries: Queries, slos: Sequence[float], cores: Sequence[int]
) -> list[dict[str, Any]]:
    """Return Fig. 5 and 6 on this machine: closed depths by the lines, over lengths and threads."""
    rows = []
    with closing(open_encoder(str(artifact), 1)) as encoder:
        most = encoder.spec.max_tokens
    lengths = sorted({min(length, most) for length in CURVE_LENGTHS})
    cells = [("fig5", length, max(cores)) for length in lengths]
    cells += [("fig6", LENGTH, count) for count in cores]
    full: dict[int, Line] = {}
    for figure, length, count in cells:
        with closing(ProcessInstance(artifact_source(artifact, count))) as cpu:
            cpu_line = time_instance(cpu, queries.sample, length, min(slos)).line
        if count == max(cores):
            full.setdefault(length, emulated_line(cpu_line))
        rows += [
            {"part": figure, "slo": slo, "length": length, "cores": count}
            | _closed(cpu_line, full.get(length, emulated_line(cpu_line)), slo)
            for slo in slos
        ]
    return rows


def _closed(cpu: Line, npu: Line, slo: float) -> dict[str, Any]:
    held = {"npu": npu.depth(slo, "closed"), "cpu": cpu.depth(slo, "closed")}
    gain = held["cpu"] / max(held["npu"], 1)
    return {**held, "gain": gain, "saving": held["cpu"] / max(sum(held.values()), 1)}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the issue, as far as their parts were run."""
    found = summarize_throughput(rows)
    table = [row for row in rows if row["part"] == "table3"]
    if table:
        found["table3_off_by"] = max(abs(row["off_by"]) for row in table)
    measured = [row for row in rows if row["part"] == "concurrency"]
    for row in measured:
        found[f"gain_{row['slo']:g}s"] = row["gain"]
        found[f"cpu_share_{row['slo']:g}s"] = row["cpu_share"]
    for row in rows:
        if row["part"] == "device":
            for name in ("gain", "cpu_share", "depth_error"):
                found[f"device_{name}_{row['slo']:g}s"] = row[name]
        if row["part"] == "device-load" and row["capacity"]:
            for name in ("p99", "p99_warm", "of_capacity", "busy_p99_ms"):
                found[f"device_load_{name}_{row['slo']:g}s"] = row[name]
    if measured:
        found["depth_error"] = max(row["depth_error"] for row in measured)
    for row in rows:
        if row["part"] == "overhead":
            found["manager_overhead_ms"] = row["manager_ms"]
        if row["part"] == "load" and row["capacity"]:
            found |= {f"load_{name}": row[name] for name in ("p99", "of_capacity", "busy_p99_ms")}
            found["load_held_afterwards"] = row["held_afterwards"]
    return found


def print_parts(report: Report) -> None:
    """Print a table for each part, and the summary."""
    console = Console(highlight=False)
    for part in dict.fromkeys(row["part"] for row in report.rows):
        rows = [
            {name: value for name, value in row.items() if name != "part"}
            for row in report.rows
            if row["part"] == part
        ]
        console.print(rows_table(part, rows))
    for name, value in report.summary.items():
        console.print(f"{name:32} {show(value)}")


def run_part(
    part: str,
    options: argparse.Namespace,
    queries: Queries | None,
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
    assert queries is not None
    source = artifact_source(options.artifact, options.threads)
    if part == "concurrency":
        return [concurrency_rows(options.artifact, options.slo, options.repeats, options.threads)]
    if part == "device":
        given = options.slo, options.repeats, options.threads, options.device
        return [device_rows(options.artifact, *given)]
    if part == "device-load":
        given = options.seconds, options.threads, options.device
        return (device_load_rows(options.artifact, slo, *given) for slo in options.slo)
    if part == "load":
        return [load_rows(source, queries, max(options.slo), options.seconds)]
    return [curve_rows(options.artifact, queries, options.slo, options.cores)]


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
    parser.add_argument("--device", default="auto", help="of torch: auto, cuda:1, torch:cpu")
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
        "accelerator": "emulated: the CPU's line by the paper's ratios, alpha x 0.21, beta x 0.84",
    }
    report: Report = open_report("embed", options, config, ("artifact", "length", "threads"))
    report.summary = summarize(report.rows)
    queries = None
    if options.artifact:
        with closing(open_encoder(str(options.artifact), 1)) as encoder:
            queries = Queries(encoder.spec.vocab_size)
    for part in parts:
        for rows in run_part(part, options, queries, tuple(report.rows)):
            report.rows += rows
            report.summary = summarize(report.rows)
            report.write(options.json)
    print_parts(report)


if __name__ == "__main__":
    main()
