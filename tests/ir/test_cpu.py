"""Features of the CPU that need the system's leave."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dovetail.codegen.targets import best_target, host_features
from dovetail.ir import cpu
from dovetail.runtime.machine.isa import REQUIREMENTS

ALL = REQUIREMENTS["x86-64-amx"].flags
REFUSED = """
import ctypes
from dovetail.ir.cpu import tiles_permitted

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(8192)  # a thread's signal stack, too small for tiles
stack = Stack(ctypes.addressof(room), 0, 8192)
if ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None):
    print("needs more without them")
else:
    print(tiles_permitted())
"""


def test_tiles_are_left_out_where_the_system_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for permitted, name in ((True, "x86-64-amx"), (False, "x86-64-avx512vnni")):
        monkeypatch.setattr(cpu, "tiles_permitted", lambda granted=permitted: granted)
        assert best_target("x86_64", cpu.usable_flags(ALL)).name == name
        lesser = ALL - cpu.TILE_FLAGS
        assert cpu.usable_flags(lesser) == lesser


def test_a_refusal_is_no_crash() -> None:
    if not host_features() >= cpu.TILE_FLAGS:
        pytest.skip("this machine has no tile registers, or refuses them")
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("False", "needs more without them"), done.stderr
