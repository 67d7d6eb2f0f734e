"""The division of the CPU among the workers of an app: set up at load, anew as the load changes.

In: an artifact's placements, then what each stage has worked. Out: shares on the workers' `Board`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping

from dovetail.ir.place import find_shares
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.seat import Board
from dovetail.topology.division import STAGES, redivide, show_shares, worker_of
from dovetail.topology.hardware import HardwareSpec

PERIOD = 0.5
"""Seconds between two looks at the load."""

log = logging.getLogger("dovetail")


def divide_cpu(artifact: Artifact, options: EngineOptions, hardware: HardwareSpec) -> Board | None:
    """Return the board of an app whose workers share the CPUs as planned; None where they do not.

    So it is where the user says how many threads run, or a device computes beside the CPU.
    """
    shares = find_shares(artifact.serve)
    said = options.plan is not None or options.threads is not None or options.beside_cpu
    if said or len(set(map(worker_of, shares))) < 2:
        return None
    if not {pu for cpus in shares.values() for pu in cpus} <= set(hardware.allowed_pus):
        log.warning("the CPUs are planned to be shared as this process may not: workers take turns")
        return None
    board = Board()
    board.divide(shares)
    given = weakref.ref(board), hardware
    threading.Thread(target=_follow, args=given, name="division", daemon=True).start()
    return board


def _follow(found: weakref.ref[Board], hardware: HardwareSpec) -> None:
    """Look at the load again and again, as long as there is the board."""
    before: Mapping[str, float] = dict.fromkeys(STAGES, 0.0)
    pause = threading.Event()
    while not pause.wait(PERIOD) and (board := found()) is not None:
        before = follow_load(board, hardware, before)
        del board


def follow_load(
    board: Board, hardware: HardwareSpec, before: Mapping[str, float]
) -> Mapping[str, float]:
    """Divide anew if that serves better what was worked since `before`; return what was by now.

    Both in core-seconds by stage. Nobody waits: workers keep to it from their next step on.
    """
    used = board.used
    seen = {stage: used[stage] - before[stage] for stage in board.shares}
    if (shares := redivide(hardware, board.shares, seen, PERIOD)) is not None:
        log.info("the load has changed: cores of %s", show_shares(shares))
        board.divide(shares)
    return used
