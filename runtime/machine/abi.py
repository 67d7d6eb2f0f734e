"""abi.h as ctypes structs, and the prototypes of the functions every kernel library exports."""

from __future__ import annotations

import ctypes

ABI = 5
SCHEDULE_LENGTH = 9
TIMES = 5
"""DT_TIMES: a thread came to an entry, began it, ended it, began and ended its reduction."""


class Slot(ctypes.Union):
    """One operand: an address, an integer or a double."""

    _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_double))


class Row(ctypes.Structure):
    """One row of a schedule table; `reduce` may be null."""

    _fields_ = (
        ("m_lo", ctypes.c_int64),
        ("kernel", ctypes.c_void_p),
        ("reduce", ctypes.c_void_p),
        ("schedule", ctypes.c_int64 * SCHEDULE_LENGTH),
    )


class Entry(ctypes.Structure):
    """One kernel call of a tape."""

    _fields_ = (
        ("rows", ctypes.POINTER(Row)),
        ("n_rows", ctypes.c_int64),
        ("first_slot", ctypes.c_int32),
        ("m_arg", ctypes.c_int32),
        ("skip_arg", ctypes.c_int32),
        ("barrier", ctypes.c_int32),
    )


class Patch(ctypes.Structure):
    """slots[slot] = args[arg] + offset at the start of every run."""

    _fields_ = (("slot", ctypes.c_int32), ("arg", ctypes.c_int32), ("offset", ctypes.c_int64))


class Tape(ctypes.Structure):
    """A bound tape."""

    _fields_ = (
        ("entries", ctypes.POINTER(Entry)),
        ("n_entries", ctypes.c_int64),
        ("slots", ctypes.POINTER(Slot)),
        ("patches", ctypes.POINTER(Patch)),
        ("n_patches", ctypes.c_int64),
        ("stop", ctypes.c_void_p),
    )


class Order(ctypes.Structure):
    """Entries of a tape for a `Runner`, and when they ran."""

    _fields_ = (
        ("tape", ctypes.POINTER(Tape)),
        ("args", ctypes.POINTER(Slot)),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("pools", ctypes.c_void_p * 2),
        ("begun", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("status", ctypes.c_int64),
        ("times", ctypes.c_int64 * 2),
    )


_INT32S = ctypes.POINTER(ctypes.c_int32)
_SLOTS = ctypes.POINTER(Slot)

PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "dt_abi": (ctypes.c_int64, ()),
    "dt_team_create": (ctypes.c_void_p, (ctypes.c_int64, _INT32S, ctypes.c_int64)),
    "dt_team_set_active": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64, _INT32S)),
    "dt_team_size": (ctypes.c_int64, (ctypes.c_void_p,)),
    "dt_team_destroy": (None, (ctypes.c_void_p,)),
    "dt_run": (
        ctypes.c_int,
        (
            *(ctypes.c_void_p, ctypes.POINTER(Tape), _SLOTS, *(ctypes.c_int64,) * 3),
            ctypes.c_void_p,
        ),
    ),
    "dt_runner_create": (ctypes.c_void_p, (ctypes.c_void_p, _INT32S, ctypes.c_int64)),
    "dt_runner_destroy": (None, (ctypes.c_void_p,)),
    "dt_runner_give": (ctypes.c_uint32, (ctypes.c_void_p, ctypes.POINTER(Order))),
    "dt_runner_release": (None, (ctypes.c_void_p,)),
    "dt_runner_wait": (None, (ctypes.c_void_p, ctypes.c_uint32)),
    "dt_runner_drop": (None, (ctypes.c_void_p,)),
    "dt_comm_bytes": (ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64)),
    "dt_comm_create": (
        ctypes.c_void_p,
        (ctypes.c_void_p, *(ctypes.c_int64,) * 4, _INT32S, ctypes.c_int64),
    ),
    "dt_comm_destroy": (None, (ctypes.c_void_p,)),
    "dt_comm_fail": (None, (ctypes.c_void_p,)),
    "dt_comm_failed": (ctypes.POINTER(ctypes.c_int32), (ctypes.c_void_p,)),
    "dt_all_reduce": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * 5)),
    "dt_all_gather": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * 7)),
}
"""Return and argument types of the functions every kernel library exports."""
STOPPED = -2
"""What dt_run returns when the tape's stop word ended it early."""
ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
_MATRIX = ("comm", "rows", "columns", "x", "stride")
COLLECTIVES = {ALL_REDUCE: _MATRIX, ALL_GATHER: (*_MATRIX, "units", "size")}
"""The kernels of collective.c, and their slots: a library has them beside those of its index."""


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the prototypes of `library` and return it; AttributeError when a symbol is missing."""
    for name, (returns, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = returns
        function.argtypes = list(arguments)
    return library


def int32_array(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int32] | None:
    """Return a C array, or None (a null pointer) for no values."""
    return (ctypes.c_int32 * len(values))(*values) if values else None
