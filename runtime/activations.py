"""How activations meet quantised weights: as integers, or in float32 as they are.

In: the tables of an artifact and its kernel index. Out: tables whose rows say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from msgspec.structs import replace

from dovetail.ir.schedule import SCHEDULE_VALUES, Row, ScheduleFile, ScheduleTable
from dovetail.runtime.artifact import Artifact, ModelPart

ACTIVATIONS = ("integer", "float")
_M_TILE = SCHEDULE_VALUES.index("m_tile")


def keep_floats(artifact: Artifact, part: ModelPart) -> ModelPart:
    """Return a model of `artifact` whose products with quantised weights round no activations.

    A kernel does so where its `m_tile` is below 0 (`gemm.dk`).
    """
    kernels = artifact.kernels.kernels
    names = {kernel.name for kernel in kernels if kernel.binding.get("ROUNDED") == "i8"}
    tables = tuple(_keep_rows(table, names) for table in part.schedules.tables)
    return dataclasses.replace(part, schedules=ScheduleFile(tables=tables))


def _keep_rows(table: ScheduleTable, names: Collection[str]) -> ScheduleTable:
    rows = (_below_zero(row) if row.kernel in names else row for row in table.rows)
    return replace(table, rows=tuple(rows))


def _below_zero(row: Row) -> Row:
    values = list(row.schedule)
    values[_M_TILE] = -abs(values[_M_TILE])
    return replace(row, schedule=tuple(values))
