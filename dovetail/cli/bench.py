"""`dovetail bench`: what serving would come to, before a machine is there to measure it on.

In: a machine class and a trace, or an artifact. Out: throughput and latency of each offload policy,
a timeline for Perfetto; or the cost tables of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dovetail.cli.options import AsJson, Threads, Trust
from dovetail.cli.profile_table import profile_table
from dovetail.cli.report import (
    print_json,
    read_duration,
    report_errors,
    show_count,
    stdout_console,
    writing,
)

if TYPE_CHECKING:
    from dovetail.runtime.calls import CallProfile
    from dovetail.runtime.sim.scenario import Scenario
    from dovetail.runtime.sim.simulator import Arrival, Simulation

POLICIES = ("auto", "off", "full")


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


@report_errors
def offload_command(
    simulate: Annotated[
        str, typer.Option(help="Machine class: t4, a10g, h100 or h200; figures are assumed.")
    ],
    trace: Annotated[
        Path, typer.Option(help="A trace of prompt and output lengths, CSV or JSON lines.")
    ],
    model: Annotated[
        str | None, typer.Option(help="A model by name, default the class's own.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace to serve.")] = 400,
    rate: Annotated[
        float | None,
        typer.Option(help="Mean arrivals per second; default as recorded, else all at once."),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="Pass through recorded arrivals this many times as fast.")
    ] = 1.0,
    gpu_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks of 16 tokens on the accelerator.")
    ] = None,
    offload: Annotated[
        str, typer.Option(help="all, or one policy: auto, off (GPU only), full (FastDecode+).")
    ] = "all",
    noise: Annotated[
        float,
        typer.Option(min=0.0, max=0.9, help="Error of the predicted times, relative."),
    ] = 0.1,
    seed: int = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what happened under the first policy, for Perfetto.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Simulate serving a trace on a machine class with and without the CPU's help."""
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
    report = _report(scenarios[0], trace, results)
    if json:
        print_json(report)
    else:
        _print(report)
    if timeline and picture:
        with writing(timeline):
            picture.write(timeline)


@report_errors
def profile_command(
    artifact: Annotated[Path, typer.Argument(help="An artifact directory.")],
    budget: Annotated[str, typer.Option(help="Time to spend: 10s, 1m.")] = "10s",
    threads: Threads = None,
    calls: Annotated[
        bool, typer.Option("--calls", help="Show where a decode step's time goes, call by call.")
    ] = False,
    sequences: Annotated[int, typer.Option(min=1, help="With --calls: of the step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="With --calls: tokens of each.")] = 128,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Measure an artifact's cost tables on this machine, or show those it has."""
    from dovetail.loading import load
    from dovetail.runtime.calls import profile_calls
    from dovetail.runtime.profiler import load_profile
    from dovetail.topology.hardware import read_hardware

    seconds = read_duration(budget)
    with load(artifact, threads=threads, trust=trust) as app:
        if calls:
            found = profile_calls(app.engine, sequences=sequences, context=context, seconds=seconds)
            if json:
                print_json(found)
            else:
                stdout_console().print(_calls_table(found))
            return
        part = next(iter(app.artifact.models.values()))
        profile = load_profile(app.artifact, part, app.engine, read_hardware(), seconds)
    if json:
        print_json(profile)
    else:
        stdout_console().print(profile_table(profile))


def _read_arrivals(
    trace: Path, requests: int, rate: float | None, speed: float, seed: int
) -> list[Arrival]:
    from dovetail.compiler.workload import read_times, read_workload
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


def _print(report: OffloadReport) -> None:
    console = stdout_console()
    table = Table(
        title=f"{report.model} on {report.machine} (simulated), {report.gpu_blocks} KV blocks, "
        f"{report.trace}",
        title_justify="left",
    )
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for policy, result in report.results.items():
        ratio = report.throughput_vs_off.get(policy)
        table.add_row(policy, *_cells(result), "" if ratio is None else f"{ratio:.3f}")
    console.print(table)
    for policy, result in report.results.items():
        if result.refused:
            console.print(f"note: {policy}: {result.refused} requests fit no pool")
    console.print("figures of this machine class, with their sources:")
    for line in report.assumptions:
        console.print(f"  {line}")


_COLUMNS = (
    "offload",
    "requests/s",
    "tokens/s",
    "TTFT p50/p90 s",
    "TPOT p50/p90 ms",
    "per token ms",
    "GPU",
    "CPU",
    "link",
    "two batches",
    "vs off",
)


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
    table = Table(
        title=f"a decode step of {show_count(profile.sequences, 'sequence')} behind "
        f"{profile.context} tokens, {show_count(profile.threads, 'thread')}: "
        f"{profile.step_us:.0f} us, median of {profile.steps}",
        title_justify="left",
    )
    table.add_column("operator")
    table.add_column("kernel")
    for name in ("calls", "us a call", "us a step", "then wait us", "share", "weights MB", "GB/s"):
        table.add_column(name, justify="right")
    for row in profile.rows:
        read = row.weight_gb_s
        table.add_row(
            row.op,
            row.kernel,
            str(row.calls),
            f"{row.call_us:.1f}",
            f"{row.step_us:.1f}",
            f"{row.wait_us:.1f}",
            f"{row.share:.1%}",
            "" if read is None else f"{row.weight_bytes / 1e6:.1f}",
            "" if read is None else f"{read:.1f}",
        )
    return table
