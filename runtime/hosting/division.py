"""The division of the CPU among the workers of an app: set up at load, anew as the load changes.

In: an artifact's placements, then what each stage has worked. Out: shares on the workers' `Board`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.ir.place import find_shares
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.cpu_time import busy_seconds, family_seconds
from dovetail.runtime.machine.devices import TORCH_CPU
from dovetail.runtime.machine.seat import Board
from dovetail.topology.division import (
    STAGES,
    Trend,
    busy_workers,
    follow_trend,
    show_shares,
    worker_of,
)
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.parameters import MachineParameters, planned_parameters

PERIOD = 0.3
"""Seconds between two looks at the load: that in which it changes, and two more, take a second."""
MOST_OTHERS = 0.5
"""Part of the CPUs that a worker could borrow which others may use for it to do so."""

log = logging.getLogger("dovetail")


def divide_cpu(artifact: Artifact, options: EngineOptions, hardware: HardwareSpec) -> Board | None:
    """Return the board of an app whose workers share the CPUs as planned; None where they do not.

    So it is where the user says how many threads run, or where torch computes on CPUs, too. Beside
    another device the engine's share is that of its attention (NEO), which decodes.
    """
    shares = find_shares(artifact.serve)
    said = options.plan is not None or options.threads is not None or options.device == TORCH_CPU
    if said or len(set(map(worker_of, shares))) < 2:
        return None
    if not {pu for cpus in shares.values() for pu in cpus} <= set(hardware.allowed_pus):
        log.warning("some planned CPUs are not available to this process; workers share the others")
        return None
    board = Board()
    board.divide(shares)
    given = weakref.ref(board), hardware, find_figures(artifact, hardware)
    threading.Thread(target=_follow, args=given, name="division", daemon=True).start()
    return board


def find_figures(artifact: Artifact, hardware: HardwareSpec) -> MachineParameters:
    """Return what a compile on such a machine found out of it; else the figures of its class."""
    there = artifact.machine
    same = there and (there.cpu_model, there.pus) == (hardware.cpu_model, hardware.pus)
    return planned_parameters(hardware, artifact.choice if same else None)


def _follow(found: weakref.ref[Board], hardware: HardwareSpec, figures: MachineParameters) -> None:
    """Look at the load again and again, as long as there is the board."""
    before = look = _look(hardware, dict.fromkeys(STAGES, 0.0))
    pause, trend = threading.Event(), Trend()
    while not pause.wait(PERIOD) and (board := found()) is not None:
        look = _look(hardware, board.used)
        trend = follow_load(board, hardware, trend, before, look, figures)
        before = look
        del board


@dataclass(frozen=True, slots=True)
class LoadLook:
    """At a time: core-seconds by stage, and those of all other programs on our CPUs."""

    now: float
    used: Mapping[str, float]
    others: float = 0.0


def _look(hardware: HardwareSpec, used: Mapping[str, float]) -> LoadLook:
    others = busy_seconds(hardware.allowed_pus) - family_seconds(os.getpid())
    return LoadLook(time.monotonic(), used, others)


def follow_load(
    board: Board,
    hardware: HardwareSpec,
    trend: Trend,
    before: LoadLook,
    now: LoadLook,
    figures: MachineParameters | None = None,
) -> Trend:
    """Divide anew if what was worked between two looks says so, see `follow_trend`.

    Nothing is lent while several workers share CPUs with other programs: a team has to wait for the
    slowest of its threads. Nobody waits: workers keep to it from their next step on.
    """
    period = now.now - before.now
    seen = {stage: now.used[stage] - before.used[stage] for stage in board.shares}
    most = MOST_OTHERS * (board.cpus - max(map(len, board.shares.values())))
    board.keep(len(busy_workers(seen, period)) > 1 and now.others - before.others > most * period)
    trend, shares = follow_trend(hardware, board.shares, trend, seen, period, now.now, figures)
    if shares is not None:
        log.info("CPU shares changed with the load: %s", show_shares(shares))
        board.divide(shares)
    return trend
