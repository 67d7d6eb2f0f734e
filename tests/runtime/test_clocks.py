"""Clocks of the wall may jump: they tell when something was made, never how long to wait."""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dovetail.runtime.app import load
from tests.repository import module_files

WALL = {"time", "time_ns", "now", "utcnow", "today", "CLOCK_REALTIME", "gmtime", "localtime"}
STAMPS = {
    "dovetail.cli.bench_serve": "the date in a report",
    "dovetail.compiler.search.choose": "when a record was made",
    "dovetail.compiler.write.index_build": "when an index was made",
    "dovetail.compiler.pipeline": "when an artifact was made",
    "dovetail.compiler.measure.recorder": "when a record was made",
    "dovetail.compiler.plan.replay": "when a replay ran",
    "dovetail.compiler.tune.model": "which records are older than the job",
    "dovetail.runtime.schedule.cost_tables": "when a profile was made",
    "dovetail.runtime.server.generation": "the API's `created`",
    "dovetail.runtime.server.models": "the API's `created`",
    "dovetail.runtime.server.workflow_chat": "the API's `created`",
    "dovetail.runtime.server.served_workflow": "the API's `created`",
}
"""All modules that read a clock of the wall, and what for."""


def reads_the_wall(file: Path) -> bool:
    """Tell whether a module uses a function of `time` or `datetime` that reads such a clock."""
    tree = ast.parse(file.read_text())
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    used = any(
        node.attr in WALL
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
        for node in named
    )
    imported = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return used or any(
        node.module == "time" and any(alias.name in WALL for alias in node.names)
        for node in imported
    )


def test_only_stamps_are_of_the_wall() -> None:
    assert {name for name, file in module_files().items() if reads_the_wall(file)} == set(STAMPS)
    for folder in ("codegen/templates", "codegen/kernels"):
        for file in (Path(__file__).parents[2] / folder).iterdir():
            assert "REALTIME" not in file.read_text() and "gettimeofday" not in file.read_text()


def test_a_wall_clock_that_jumps_changes_no_answer(
    make_artifact: Callable[..., Path],
    answer: Callable[..., Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jumps = itertools.cycle((0.0, 4e9, 1.0, -4e9))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    with load(make_artifact()) as app:
        for prompt in ([1, 2], [3], [4, 5, 6]):
            (done,) = app.generate(prompt, max_tokens=20)
            assert list(done.token_ids) == answer(prompt, 20)
