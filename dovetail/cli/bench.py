"""`dovetail bench offload|profile`: serving simulated on a machine class, costs measured here.

In: a machine class and a trace, or an artifact. Out: throughput and latency of each offload policy,
a timeline for Perfetto; or the cost tables of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dovetail.cli.options import ArtifactDirectory, AsJson, Threads, Trust
from dovetail.cli.profile_table import profile_table
from dovetail.cli.report import make_table, read_duration, show_count, show_report, writing
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.runtime.engine.calls import CallProfile
    from dovetail.runtime.sim.scenario import Scenario
    from dovetail.runtime.sim.simulator import Arrival, Simulation

POLICIES = ("auto", "off", "full")
COLUMNS = (
    *(">offload", ">requests/s", ">tokens/s", ">TTFT p50/p90 s", ">TPOT p50/p90 ms"),
    *(">per token ms", ">GPU", ">CPU", ">link", ">two batches", ">vs off"),
)


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What `bench offload --json` prints; `results` by policy, ratios to the policy `off`."""

    machine: str
    model: str
    trace: str
    gpu_blocks: int
    noise: float
    seed: int
    assumptions: tuple[str, ...]
    results: dict[str, Simulation]
    throughput_vs_off: dict[str, float]


def offload_command(
    simulate: Annotated[
        str, "Machine class to simulate: t4, a10g, h100 or h200, with assumed figures."
    ],
    trace: Annotated[Path, "Trace of prompt and output lengths, CSV or JSON lines."],
    model: Annotated[str | None, "Model by name; default that of the machine class."] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests of the trace.")] = 400,
    rate: Annotated[
        float | None, "Mean arrivals per second; default as recorded, else all at once."
    ] = None,
    speed: Annotated[float, "Replay recorded arrivals this many times faster."] = 1.0,
    gpu_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks of 16 tokens on the accelerator.")
    ] = None,
    offload: Annotated[
        str, "Policy: auto, off (accelerator only), full (FastDecode+), or all of them."
    ] = "all",
    noise: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Relative error of predicted times.")
    ] = 0.1,
    seed: Annotated[int, "Seed of the simulation."] = 0,
    timeline: Annotated[
        Path | None, "Record the first policy's run in this file, for ui.perfetto.dev."
    ] = None,
    json: AsJson = False,
) -> None:
    """Simulate serving a trace on a machine class, with and without offloading to the CPU."""
    from dovetail.runtime.sim.scenario import make_scenario
    from dovetail.runtime.timeline import Timeline

    policies = POLICIES if offload == "all" else (offload,)
    scenarios = [
        make_scenario(simulate, model, policy, gpu_blocks=gpu_blocks, noise=noise, seed=seed)
        for policy in policies
    ]
    arrivals = _read_arrivals(trace, requests, rate, speed, seed)
    picture = Timeline() if timeline else None
    results = {
        policy: scenario.run(arrivals, picture if policy == policies[0] else None)
        for policy, scenario in zip(policies, scenarios, strict=True)
    }
    show_report(_report(scenarios[0], trace, results), _describe, json=json)
    if timeline and picture:
        with writing(timeline):
            picture.write(timeline)


def profile_command(
    artifact: ArtifactDirectory,
    budget: Annotated[str, "Maximum time for measurements: 10s, 1m."] = "10s",
    threads: Threads = None,
    calls: Annotated[bool, "Show where a decode step spends its time, call by call."] = False,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="With --calls: sequences of the step; default 1.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="With --calls: tokens of each sequence; default 128.")
    ] = None,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Measure an artifact's cost tables on this machine, or show the stored ones."""
    from dovetail.loading import load
    from dovetail.runtime.engine.calls import profile_calls
    from dovetail.runtime.engine.profiler import load_profile
    from dovetail.topology.hardware import read_hardware

    seconds = read_duration(budget)
    step = {"sequences": sequences, "context": context}
    given = {name: value for name, value in step.items() if value is not None}
    if given and not calls:
        raise SpecError(f"--{next(iter(given))} needs --calls; add --calls")
    with load(artifact, threads=threads, trust=trust) as app:
        engine = app.engine  # first: an encoder has none, and says so
        if calls:
            found = profile_calls(engine, **given, seconds=seconds)
            show_report(found, lambda found: [_calls_table(found)], json=json)
            return
        part = next(iter(app.artifact.models.values()))
        profile = load_profile(app.artifact, part, engine, read_hardware(), seconds)
    show_report(profile, lambda profile: [profile_table(profile)], json=json)


def _read_arrivals(
    trace: Path, requests: int, rate: float | None, speed: float, seed: int
) -> list[Arrival]:
    from dovetail.compiler.rules.workload import read_times, read_workload
    from dovetail.runtime.sim.scenario import schedule

    workload, times = read_workload(trace), read_times(trace)
    lengths = list(zip(workload.prompt_lengths, workload.output_lengths, strict=True))[:requests]
    return schedule(lengths, rate=rate, seed=seed, times=times[:requests], speed=speed)


def _report(scenario: Scenario, trace: Path, results: dict[str, Simulation]) -> OffloadReport:
    base = results.get("off")
    machine = scenario.machine
    return OffloadReport(
        machine=machine.name,
        model=scenario.model,
        trace=trace.name,
        gpu_blocks=machine.gpu_blocks,
        noise=scenario.noise,
        seed=scenario.seed,
        assumptions=machine.sources(),
        results=results,
        throughput_vs_off={
            policy: result.rate / base.rate
            for policy, result in results.items()
            if base is not None and base.rate
        },
    )


def _describe(report: OffloadReport) -> Iterator[Table | str]:
    title = f"{report.model} on {report.machine} (simulated), {report.gpu_blocks} KV blocks, "
    ratios = report.throughput_vs_off
    yield make_table(
        title + report.trace,
        COLUMNS,
        [
            (policy, *_cells(result), f"{ratios[policy]:.3f}" if policy in ratios else "")
            for policy, result in report.results.items()
        ],
    )
    for policy, result in report.results.items():
        if result.refused:
            yield f"note: {policy}: {result.refused} requests are larger than every KV pool"
    yield "figures of this machine class, with their sources:"
    yield from (f"  {line}" for line in report.assumptions)


def _cells(result: Simulation) -> tuple[str, ...]:
    return (
        f"{result.rate:.3f}",
        f"{result.tokens_rate:.1f}",
        f"{result.ttft.p50:.2f} / {result.ttft.p90:.2f}",
        f"{1e3 * result.tpot.p50:.1f} / {1e3 * result.tpot.p90:.1f}",
        f"{1e3 * result.per_token.mean:.1f}",
        *(f"{share:.0%}" for share in (result.gpu, result.cpu, result.link, result.two_batch)),
    )


def _calls_table(profile: CallProfile) -> Table:
    columns = ("calls", "us a call", "us a step", "then wait us", "share", "weights MB", "GB/s")
    rows = [
        (
            row.op,
            row.kernel,
            str(row.calls),
            f"{row.call_us:.1f}",
            f"{row.step_us:.1f}",
            f"{row.wait_us:.1f}",
            f"{row.share:.1%}",
            "" if row.weight_gb_s is None else f"{row.weight_bytes / 1e6:.1f}",
            "" if row.weight_gb_s is None else f"{row.weight_gb_s:.1f}",
        )
        for row in profile.rows
    ]
    title = (
        f"a decode step of {show_count(profile.sequences, 'sequence')} with {profile.context} "
        f"tokens of context, {show_count(profile.threads, 'thread')}: {profile.step_us:.0f} us, "
        f"median of {profile.steps}"
    )
    return make_table(title, ("operator", "kernel", *(f">{name}" for name in columns)), rows)
