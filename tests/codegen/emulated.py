"""Kernels of another machine, run under qemu: a static program that answers calls over pipes.

`EmulatedKernels.call(name, slots, tid, nth)` does what a native tape entry does: arrays change.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.emit import emit_unit, kernel_text
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import lower_request
from dovetail.ir.high.nodes import Unit
from tests.codegen.programs import STREAMS, build_program

DRIVER = """
static _Alignas(64) unsigned char memory[1 << 26];

static int64_t number(void) {
  int64_t value;
  take(&value, sizeof value);
  return value;
}

/* A call: kernel, tid, nth, schedule; buffers (size, bytes); slots (kind, value, offset). The
 * answer: the buffers. */
int main(void) {
  for (;;) {
    int64_t kernel = number(), tid = number(), nth = number();
    int64_t schedule[DT_SCHEDULE_VALUES], sizes[64];
    unsigned char *buffers[64], *next = memory;
    dt_slot slots[64];
    take(schedule, sizeof schedule);
    int64_t n_buffers = number();
    for (int64_t i = 0; i < n_buffers; ++i) {
      sizes[i] = number();
      buffers[i] = next;
      next += (sizes[i] / 64 + 1) * 64;
      if (next > memory + sizeof memory) _exit(3);
      take(buffers[i], sizes[i]);
    }
    int64_t n_slots = number();
    for (int64_t i = 0; i < n_slots; ++i) {
      int64_t kind = number(), value = number(), offset = number();
      slots[i].i = value;
      if (kind == 1) slots[i].p = buffers[value] + offset;
    }
    kernels[kernel](slots, schedule, tid, nth);
    for (int64_t i = 0; i < n_buffers; ++i) give(buffers[i], sizes[i]);
  }
}
"""


def emulator_for(target: Target) -> tuple[str, ...]:
    """Return the command that runs programs of the target; skips the test where there is none."""
    if target.machine in ("", platform.machine()):
        return ()
    for name in (f"qemu-{target.machine}", f"qemu-{target.machine}-static"):
        path = shutil.which(name)
        if path is not None:
            return (path,)
    pytest.skip(f"qemu-{target.machine} is not installed (Debian package qemu-user)")


class EmulatedKernels:
    """A running program that holds the requested kernels of a target."""

    def __init__(
        self,
        target: Target,
        requests: Sequence[KernelRequest],
        modules: Mapping[str, Unit] | None = None,
        cache: Path | None = None,
    ) -> None:
        command = emulator_for(target)
        known = modules or {}
        kernels = tuple(lower_request(r, target, known.get(r.module)) for r in requests)
        self._index = {kernel.entry.name: i for i, kernel in enumerate(kernels)}
        entries = ", ".join(f"dt_entry_{name}" for name in self._index)
        unit = emit_unit("emulated", target, [kernel_text(k, target) for k in kernels], ())
        text = f"{unit}\nstatic const dt_kernel kernels[] = {{ {entries} }};\n{STREAMS}{DRIVER}"
        program = [*command, str(build_program(target, text, cache))]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(
        self,
        kernel: str,
        slots: Sequence[Any],
        tid: int = 0,
        nth: int = 1,
        schedule: Sequence[int] = (0,) * 9,
    ) -> None:
        """Run one thread's share of a kernel; the arrays among `slots` are updated in place."""
        roots, records = describe(slots)
        head = (self._index[kernel], tid, nth, *schedule, len(roots))
        words = struct.pack(f"<{len(head)}q", *head)
        parts = [struct.pack("<q", root.nbytes) + root.tobytes() for root in roots]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            b"".join([words, *parts, struct.pack("<q", len(slots)), *records])
        )
        self._process.stdin.flush()
        for root in roots:
            data = self._process.stdout.read(root.nbytes)
            assert len(data) == root.nbytes, "the emulated program has died"
            root.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def describe(slots: Sequence[Any]) -> tuple[list[np.ndarray], list[bytes]]:
    """Return the arrays behind the pointer operands, each once, and one record for every slot."""
    roots: list[np.ndarray] = []
    records = []
    for slot in slots:
        if isinstance(slot, np.ndarray):
            root = slot
            while isinstance(root.base, np.ndarray):
                root = root.base
            assert root.flags.c_contiguous
            position = next((i for i, r in enumerate(roots) if r is root), len(roots))
            roots += [root] * (position == len(roots))
            records.append(struct.pack("<3q", 1, position, slot.ctypes.data - root.ctypes.data))
        elif isinstance(slot, float | np.floating):
            records.append(struct.pack("<qdq", 0, slot, 0))
        else:
            records.append(struct.pack("<3q", 0, 0 if slot is None else int(slot), 0))
    return roots, records
