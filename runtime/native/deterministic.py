"""Schedule tables as options of `load` change them: in one order of sums, or without rounding.

In: the tables of an artifact and its kernel index. Out: in deterministic mode (design §11.6) tables
whose bits do not depend on M, batch, threads or phase: K is summed in one chain, keys in blocks of
one size, prompts and decodes by the same text; `shard.py` keeps these sums whole where several
processes share a model. With float activations, tables whose kernels round none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.errors import ArtifactError
from dovetail.ir.model import OWN_GATE
from dovetail.ir.schedule import ORDERS, SCHEDULE_VALUES, Row, ScheduleFile, ScheduleTable
from dovetail.runtime.artifact import Artifact, ModelPart

ACTIVATIONS = ("integer", "float")


def adapt_part(artifact: Artifact, part: ModelPart, floats: bool, fixed: bool) -> ModelPart:
    """Return a model with tables as options of a load ask; ArtifactError where it lacks kernels."""
    kernels: Sequence[KernelEntry] = artifact.kernels.kernels
    tables = tuple(t for t in part.schedules.tables if t.target == artifact.target)
    try:
        if floats:
            tables = keep_floats(tables, kernels)
        kernels = [kernel for kernel in kernels if not (floats and _rounds(kernel))]
        if fixed:
            tables = fix_reduction(tables, sorted(kernels, key=_rounds, reverse=True))
    except LookupError as error:
        raise ArtifactError(
            f"{artifact.path} lacks the kernel {error.args[0]} for deterministic loads or float "
            f"activations; run `dovetail compile MODEL -o {artifact.path}` again"
        ) from None
    return dataclasses.replace(part, schedules=ScheduleFile(tables=tables))


def fix_reduction(
    tables: Iterable[ScheduleTable], kernels: Sequence[KernelEntry]
) -> tuple[ScheduleTable, ...]:
    """Return the tables of one target with one order of sums for all rows, phases and threads.

    Raises LookupError with the name of a kernel family that is not among `kernels`.
    """
    known, fixed = {kernel.name: kernel for kernel in kernels}, []
    for table in (table for table in tables if table.op != OWN_GATE):  # it may serve one phase
        first = known.get(table.rows[0].kernel)
        rule = _RULES.get(first.family) if first else None
        fixed.append(replace(table, rows=rule(table.rows, known)) if rule else table)
    return tuple(fixed)


_Rows = tuple[Row, ...]


def _chain(rows: _Rows, known: dict[str, KernelEntry]) -> _Rows:
    """Return products that sum K in one chain; threads that shared K share columns.

    Slices of K stay where they are innermost: the chain goes on from one to the next. In kernels of
    older artifacts, which have no `SUMS`, each began its own.
    """
    chained = []
    for row in rows:
        values, binding = _values(row), known[row.kernel].binding
        parts = max(values["grid_k"], 1)
        values |= {"grid_k": 1, "grid_n": max(values["grid_n"], 1) * parts}
        if ORDERS[values["order"]][-1] != "k" or "SUMS" not in binding:
            values["block_k"] = 0
        if binding.get("DOT"):  # rounds activations from some M on: do so at any
            values["m_tile"] = -max(abs(values["m_tile"]), 1)
        chained.append(replace(row, schedule=tuple(values.values()), reduce_kernel=None))
    return tuple(chained)


def _prompts(rows: _Rows, known: dict[str, KernelEntry]) -> _Rows:
    """Return prefill attention by the instance whose bits `_decodes` has."""
    rival = _find("decode_attention_rows", known)
    alike = {k.name: k for k in known.values() if k.binding == rival.binding}
    return (_one_row(rows[0], _find("prefill_attention", alike)),)


def _decodes(rows: _Rows, known: dict[str, KernelEntry]) -> _Rows:
    """Return decode attention by prefill attention's text: a prompt may be cut anywhere."""
    return (_one_row(rows[0], _find("decode_attention_rows", known)),)


def _one_row(row: Row, kernel: KernelEntry) -> Row:
    return replace(row, m_lo=1, kernel=kernel.name, reduce_kernel=None)


def _find(family: str, known: dict[str, KernelEntry]) -> KernelEntry:
    found = [kernel for kernel in known.values() if kernel.family == family]
    if not found:
        raise LookupError(family)
    return found[0]


_RULES: dict[str, Callable[[_Rows, dict[str, KernelEntry]], _Rows]] = {
    "gemm_linear": _chain,
    "gemm_silu": _chain,
    "prefill_attention": _prompts,
    "decode_attention": _decodes,
}
"""Kernel family to how the rows that name it are fixed; other kernels give a row its bits alone."""


def keep_floats(
    tables: Iterable[ScheduleTable], kernels: Sequence[KernelEntry]
) -> tuple[ScheduleTable, ...]:
    """Return tables whose products with quantised weights, and attention, round no activations.

    A product does so where its `m_tile` is below 0 (`gemm.dk`); attention has instances that do.
    Raises LookupError with its family where there is none among `kernels`.
    """
    known = {kernel.name: kernel for kernel in kernels}
    return tuple(replace(t, rows=tuple(_float_row(row, known) for row in t.rows)) for t in tables)


def _float_row(row: Row, known: dict[str, KernelEntry]) -> Row:
    kernel = known[row.kernel]
    if kernel.binding.get("ROUNDED") == "i8":
        values = _values(row)
        values["m_tile"] = -abs(values["m_tile"])
        return replace(row, schedule=tuple(values.values()))
    if _rounds(kernel):
        alike = {k.name: k for k in known.values() if k.binding.get("KV") == kernel.binding["KV"]}
        exact = {name: k for name, k in alike.items() if not _rounds(k)}
        return replace(row, kernel=_find(kernel.family, exact).name)
    return row


def _values(row: Row) -> dict[str, int]:
    return dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))


def _rounds(kernel: KernelEntry) -> bool:
    """Return whether it is attention that multiplies bfloat16 pairs, of many keys or of any."""
    return "_attention" in kernel.family and bool(kernel.binding.get("DOT"))
