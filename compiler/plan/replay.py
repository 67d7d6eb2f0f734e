"""Measures plans on this machine: a short replay of the trace with the real kernels and processes.

In: a PlanChoice and a finished artifact. Out: the choice with measured seconds, the best pair
first. The plans run in a child process (`replay_child`), all of them in turns; where that crashes,
hangs or is refused, the simulated choice stands and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from statistics import quantiles
from typing import Any

import msgspec
from msgspec.structs import replace

from dovetail.compiler.measure.answers import Memory, spell_time
from dovetail.compiler.plan.service import service_plan
from dovetail.ir.artifact import Manifest, ServicePlan
from dovetail.ir.errors import DovetailError
from dovetail.ir.model import ModelSpec
from dovetail.ir.plans import MEASURED, PairChoice, PlanCandidate, PlanChoice
from dovetail.ir.schedule import ScheduleTable
from dovetail.runtime.child.child import Child, ChildLost
from dovetail.runtime.machine.cpu_time import QUIET_CORES, busy_cores
from dovetail.topology.replay import Trace

PROMPTS, STEPS = 3, 4
"""Prompts of a round, at even quantiles of the trace's lengths, and decode steps at each batch."""
ROUNDS, WANTED_ROUNDS = 9, 4
"""Rounds at most, and those that the prompts are shortened for."""
SHORTEST = 1 / 16
"""No prompt is cut below this part of its length: a round then takes longer than it should."""
TIE = 0.02
"""Of pairs this close to the fastest the simulator's favourite is taken: less is noise."""
TIMEOUT = 900.0
REPLAYS = 3
"""How many compiles replay the same plans and kernels while that comes to nothing."""
NOT_TIMED = ("hardware.json", "plans/", "graph/", "tuning.jsonl")
"""Files of an artifact that say nothing about how fast its kernels run."""
_FAILED = (
    "the plans could not be measured on this machine (memory may have run out, or processes may "
    "not start), so that the simulated choice stands; compile again to try once more"
)
_BUSY = (
    "the machine was busy with other work while the plans were measured ({:.1f} cores at best), so "
    "that the simulated choice stands; compile again when it is idle"
)


class ReplayJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the child runs: rounds of all plans in turns, no further one after `seconds`.

    prompts: their tokens. steps: of decoding, at each of `batches`. tables: schedules of each plan,
    by default the artifact's own for all. least_rounds: those that run however long they take.
    """

    artifact: str
    plans: tuple[ServicePlan, ...]
    tables: tuple[tuple[ScheduleTable, ...], ...] = ()
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int = STEPS
    vocab_size: int
    rounds: int = ROUNDS
    least_rounds: int = 1
    seconds: float


class ReplayTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Per plan and round: seconds of a token of a prompt, and of a decoded token.

    prefill: mean over the tokens of all prompts. decode: mean over the batches.

    others: per round, the cores that work of others kept busy meanwhile.
    """

    prefill: tuple[tuple[float, ...], ...]
    decode: tuple[tuple[float, ...], ...]
    others: tuple[float, ...]

    def quiet(self) -> ReplayTimes:
        """Return the rounds in which the machine was ours."""
        kept = [cores <= QUIET_CORES for cores in self.others]
        prefill, decode, (others,) = (
            tuple(tuple(compress(rounds, kept)) for rounds in phase)
            for phase in (self.prefill, self.decode, (self.others,))
        )
        return ReplayTimes(prefill=prefill, decode=decode, others=others)


class PastReplay(msgspec.Struct, frozen=True, kw_only=True):
    """What replays of some plans came to; `times` of the latest, None where it failed."""

    times: ReplayTimes | None
    tries: int
    when: datetime

    @property
    def useful(self) -> bool:
        """Whether plans can be compared by it."""
        return self.times is not None and bool(self.times.quiet().others)


def measure_choice(
    choice: PlanChoice,
    artifact: Path,
    spec: ModelSpec,
    trace: Trace,
    seconds: float,
    memory: Memory | None = None,
) -> PlanChoice:
    """Return `choice` by measuring its pairs with the kernels of `artifact`, about `seconds` long.

    All candidates run at least once, however long that takes. What `memory` has of the same plans
    and kernels is not run again.
    """
    covers = cover_pairs(choice.pairs)
    job = ReplayJob(
        artifact=str(artifact),
        plans=tuple(service_plan(choice, pair) for pair in covers),
        prompts=choose_prompts(choice, covers, trace, seconds, spec.max_context),
        batches=trace.batches,
        vocab_size=spec.vocab_size,
        seconds=seconds,
    )
    times, source = replay_once(job, artifact, memory)
    if times is None or not times.quiet().others:
        note = _FAILED if times is None else _BUSY.format(min(times.others))
        return replace(choice, notes=(*choice.notes, note + source))
    times = times.quiet()
    prefill = _spread([pair.prefill for pair in covers], times.prefill, trace.mean_prompt)
    decode = _spread([pair.decode for pair in covers], times.decode, trace.mean_output)
    shown = (
        f"prompts of {_spell(job.prompts)} tokens, {STEPS} decode steps of {_spell(job.batches)} "
        f"sequences, lower quartile of {len(times.others)} quiet rounds, scaled to the trace's "
        f"mean lengths{source}"
    )
    return apply_times(replace(choice, replay=shown), prefill, decode)


def choose_prompts(
    choice: PlanChoice, covers: Sequence[PairChoice], trace: Trace, seconds: float, max_context: int
) -> tuple[int, ...]:
    """Return the tokens of the prompts of a round.

    Those at even quantiles of the trace's lengths; all of them halved until the simulator expects
    some rounds of all plans to fit into `seconds`. They fill half a context at most, so that there
    is room to decode.
    """
    lengths = [prompt for prompt, _ in trace.sample(PROMPTS).requests]
    prompts = sum(choice.prefill[pair.prefill].simulated or 0.0 for pair in covers)
    answers = sum(choice.decode[pair.decode].simulated or 0.0 for pair in covers)
    per_token = prompts / max(1.0, trace.mean_prompt)
    decoding = answers / max(1.0, trace.mean_output) * STEPS * sum(trace.batches)
    left = seconds / WANTED_ROUNDS - decoding
    part = 1.0
    while part > SHORTEST and part * sum(lengths) * per_token > left:
        part /= 2
    return tuple(max(1, min(round(part * n), max_context // 2)) for n in lengths)


def _spell(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def replay_once(
    job: ReplayJob, artifact: Path, memory: Memory | None
) -> tuple[ReplayTimes | None, str]:
    """Return the times of a job, and when and by whom they were taken if that was not now.

    A replay that came to nothing is tried again by later compiles, a few times and only once the
    machine is quiet.
    """
    if memory is None:
        return run_replay(job), ""
    question = _question(job, artifact)
    past = memory.recall(question, PastReplay)
    cpus = {cpu for plan in job.plans for cpu in (*plan.prefill.cpus, *plan.decode.cpus)}
    if past and (past.useful or past.tries >= REPLAYS or busy_cores(cpus) > QUIET_CORES):
        return past.times, f" (replayed on {spell_time(past.when)} by an earlier compile)"
    made = PastReplay(
        times=run_replay(job), tries=past.tries + 1 if past else 1, when=datetime.now(UTC)
    )
    memory.remember(question, made)
    return made.times, ""


def _question(job: ReplayJob, artifact: Path) -> Any:
    """Return what the times of a job depend on: plans, requests, and the files that are run."""
    manifest = msgspec.json.decode((artifact / "manifest.json").read_bytes(), type=Manifest)
    files = {
        name: (file.bytes, file.sha256)
        for name, file in manifest.files.items()
        if not name.startswith(NOT_TIMED)
    }
    return replace(job, artifact=""), files


def cover_pairs(pairs: Sequence[PairChoice]) -> tuple[PairChoice, ...]:
    """Return the fewest pairs in which every candidate of `pairs` that can meet one occurs."""
    found: list[PairChoice] = []
    left = list(pairs)
    while left:
        new_prefill, new_decode = (
            {getattr(p, side) for p in left} - {getattr(p, side) for p in found}
            for side in ("prefill", "decode")
        )
        gains = [(p.prefill in new_prefill) + (p.decode in new_decode) for p in left]
        if not max(gains):
            break
        found.append(left.pop(gains.index(max(gains))))
    return tuple(found)


def run_replay(job: ReplayJob) -> ReplayTimes | None:
    """Return the child's times; None where it crashed, hung or was refused."""
    child = Child.start(
        "dovetail.compiler.plan.replay_child", "the replaying process {}", quiet=True
    )
    try:
        return child.ask(job, ReplayTimes, TIMEOUT)
    except (ChildLost, DovetailError):
        return None
    finally:
        child.kill()


def apply_times(
    choice: PlanChoice, prefill: dict[int, float], decode: dict[int, float]
) -> PlanChoice:
    """Return the choice with seconds per request by candidate, and its pairs ranked by them."""
    times = [prefill[pair.prefill] + decode[pair.decode] for pair in choice.pairs]
    best = next(i for i, seconds in enumerate(times) if seconds <= min(times) * (1 + TIE))
    ranked = sorted(range(len(times)), key=lambda i: (i != best, times[i]))
    return replace(
        choice,
        source=MEASURED,
        prefill=_with_times(choice.prefill, prefill),
        decode=_with_times(choice.decode, decode),
        pairs=tuple(replace(choice.pairs[i], measured=times[i]) for i in ranked),
    )


def _with_times(
    candidates: Sequence[PlanCandidate], seconds: dict[int, float]
) -> tuple[PlanCandidate, ...]:
    return tuple(replace(c, measured=seconds.get(i)) for i, c in enumerate(candidates))


def _spread(
    places: Sequence[int], times: Sequence[Sequence[float]], scale: float
) -> dict[int, float]:
    """Return candidate -> scaled lower quartile, the least where a candidate ran in two plans."""
    found: dict[int, float] = {}
    for place, rounds in zip(places, times, strict=True):
        low = rounds[0] if len(rounds) < 2 else quantiles(rounds, n=4, method="inclusive")[0]
        found[place] = min(low * scale, found.get(place, low * scale))
    return found
