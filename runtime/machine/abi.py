"""abi.h as ctypes structs, and the prototypes of the functions every kernel library exports."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_uint32, c_void_p

ABI = 11
SCHEDULE_LENGTH = 9
TIMES = 5
"""DT_TIMES: a thread came to an entry, began it, ended it, began and ended its reduction."""
MOST_SLOTS = 32


class Slot(ctypes.Union):
    """One operand: an address, an integer or a double."""

    _fields_ = (("p", c_void_p), ("i", c_int64), ("f", c_double))


class Row(ctypes.Structure):
    """One row of a schedule table; `reduce` may be null."""

    _fields_ = (
        ("m_lo", c_int64),
        ("kernel", c_void_p),
        ("reduce", c_void_p),
        ("schedule", c_int64 * SCHEDULE_LENGTH),
    )


class Groups(ctypes.Structure):
    """The weights of a product of several, and which of its slots hold what."""

    _fields_ = (
        ("count", c_int64),
        ("bytes", c_int64),
        ("bias_bytes", c_int64),
        ("starts", c_void_p),
        *((name, c_int32) for name in ("n_slots", "m", "a", "lda", "b", "bias", "c", "ldc")),
    )


class Entry(ctypes.Structure):
    """One kernel call of a tape."""

    _fields_ = (
        ("rows", POINTER(Row)),
        ("n_rows", c_int64),
        ("first_slot", c_int32),
        ("m_arg", c_int32),
        ("skip_arg", c_int32),
        ("barrier", c_int32),
        ("groups", POINTER(Groups)),
    )


class Patch(ctypes.Structure):
    """slots[slot] = args[arg] + offset at the start of every run."""

    _fields_ = (("slot", c_int32), ("arg", c_int32), ("offset", c_int64))


class Tape(ctypes.Structure):
    """A bound tape."""

    _fields_ = (
        ("entries", POINTER(Entry)),
        ("n_entries", c_int64),
        ("slots", POINTER(Slot)),
        ("patches", POINTER(Patch)),
        ("n_patches", c_int64),
        ("stop", c_void_p),
    )


class Order(ctypes.Structure):
    """Entries of a tape for a `Runner`, and when they ran."""

    _fields_ = (
        ("tape", POINTER(Tape)),
        ("args", POINTER(Slot)),
        ("first", c_int64),
        ("last", c_int64),
        ("pools", c_void_p * 2),
        ("begun", c_void_p),
        ("block_bytes", c_int64),
        ("status", c_int64),
        ("times", c_int64 * 2),
    )


_INT32S = POINTER(c_int32)
_SLOTS = POINTER(Slot)

PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "dt_abi": (c_int64, ()),
    "dt_team_create": (c_void_p, (c_int64, _INT32S, c_int64)),
    "dt_team_set_active": (c_int, (c_void_p, c_int64, _INT32S)),
    "dt_team_size": (c_int64, (c_void_p,)),
    "dt_team_destroy": (None, (c_void_p,)),
    "dt_run": (c_int, (c_void_p, POINTER(Tape), _SLOTS, c_int64, c_int64, c_int64, c_void_p)),
    "dt_runner_create": (c_void_p, (c_void_p, _INT32S, c_int64)),
    "dt_runner_destroy": (None, (c_void_p,)),
    "dt_runner_give": (c_uint32, (c_void_p, POINTER(Order))),
    "dt_runner_release": (None, (c_void_p,)),
    "dt_runner_wait": (None, (c_void_p, c_uint32)),
    "dt_runner_drop": (None, (c_void_p,)),
    "dt_comm_bytes": (c_int64, (c_int64, c_int64)),
    "dt_comm_create": (c_void_p, (c_void_p, *(c_int64,) * 4, _INT32S, c_int64)),
    "dt_comm_destroy": (None, (c_void_p,)),
    "dt_comm_fail": (None, (c_void_p,)),
    "dt_comm_failed": (POINTER(c_int32), (c_void_p,)),
    "dt_all_reduce": (c_int, (c_void_p, c_void_p, *(c_int64,) * 5)),
    "dt_all_gather": (c_int, (c_void_p, c_void_p, *(c_int64,) * 7)),
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


def int32_array(values: tuple[int, ...]) -> ctypes.Array[c_int32] | None:
    """Return a C array, or None (a null pointer) for no values."""
    return (c_int32 * len(values))(*values) if values else None
