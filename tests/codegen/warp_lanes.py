"""One block of the cuda target with a CPU thread for every lane, under a thread sanitizer.

In: lowered kernels. Out: `LaneProgram.call`, which runs a kernel on numpy arrays and returns what
the sanitizer wrote: nothing, unless lanes touched memory without waiting for each other.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.emit import KernelSpec
from dovetail.codegen.emit_cuda import emit_cuda
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.ir.artifact import KernelEntry
from tests.codegen.emulated import describe

WORDS = Path(__file__).with_name("warp_lanes.h")
FLAGS = ("-O0", "-std=c++17", "-w", "-pthread", "-fsanitize=thread", "-ffp-contract=off")
DRIVER = r"""
union slot { void* p; int64_t i; double f; };
typedef void (*kernel_t)(const slot*);
static const kernel_t kernels[] = { KERNELS };
static kernel_t kernel;
static slot slots[64];

static void take(void* to, size_t n) { if (n && fread(to, 1, n, stdin) != n) exit(3); }
static int64_t number(void) { int64_t value; take(&value, sizeof value); return value; }
static void* lane(void* index) {
  threadIdx.x = (unsigned)(uintptr_t)index;
  kernel(slots);
  return NULL;
}

int main(void) {
  unsigned char* buffers[64];
  int64_t sizes[64];
  pthread_t threads[256];
  kernel = kernels[number()];
  blockDim.x = 32 * number();
  int64_t n_buffers = number();
  for (int64_t i = 0; i < n_buffers; ++i) {
    sizes[i] = number();
    buffers[i] = (unsigned char*)aligned_alloc(64, (sizes[i] / 64 + 1) * 64);
    take(buffers[i], sizes[i]);
  }
  int64_t n_slots = number();
  for (int64_t i = 0; i < n_slots; ++i) {
    int64_t kind = number();
    slots[i].i = number();
    int64_t offset = number();
    if (kind == 1) slots[i].p = buffers[slots[i].i] + offset;
  }
  for (unsigned w = 0; w < blockDim.x / 32; ++w) pthread_barrier_init(&dt_barriers[w], NULL, 32);
  for (uintptr_t t = 0; t < blockDim.x; ++t) pthread_create(&threads[t], NULL, lane, (void*)t);
  for (unsigned t = 0; t < blockDim.x; ++t) pthread_join(threads[t], NULL);
  for (int64_t i = 0; i < n_buffers; ++i) fwrite(buffers[i], 1, sizes[i], stdout);
}
"""
FIELDS = {"f32": "(float)s[{}].f", "i64": "s[{}].i"}
POINTERS = {"f32": "float", "i32": "int32_t", "i64": "int64_t", "bf16": "uint16_t"}


def unpacking(entry: KernelEntry) -> str:
    """Return the C++ function that calls a kernel with its slots."""
    kinds = [p.type for p in entry.params if p.kind != "thread"]
    values = ", ".join(
        f"({POINTERS[kind[4:-1]]}*)s[{i}].p" if kind.startswith("ptr[") else FIELDS[kind].format(i)
        for i, kind in enumerate(kinds)
    )
    return f"static void run_{entry.name}(const slot* s) {{ dt_cuda_{entry.name}({values}); }}\n"


class LaneProgram:
    """A program that runs one block of a kernel; built without a cache, in `folder`."""

    def __init__(
        self, kernels: Sequence[KernelSpec], folder: Path, flags: Sequence[str] = ()
    ) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("g++ is not installed, whose thread sanitizer is needed")
        made = emit_cuda("lanes", DEVICE_TARGETS["cuda"], tuple(kernels))
        names = [k.entry.name for k in kernels]
        table = ", ".join(f"run_{name}" for name in names)
        head, _, tail = DRIVER.partition("typedef")
        driver = f"{head}{''.join(unpacking(k.entry) for k in kernels)}typedef{tail}"
        text = f'#include "{WORDS}"\n{made}{driver.replace("KERNELS", table)}'
        (folder / "lanes.cpp").write_text(text)
        self._index = {name: i for i, name in enumerate(names)}
        self._program = folder / "lanes"
        command = [compiler, *FLAGS, *flags, "lanes.cpp", "-o", "lanes"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if "tsan" in done.stderr:
            pytest.skip("g++ has no thread sanitizer here")
        assert done.returncode == 0, done.stderr

    def call(self, kernel: str, slots: Sequence[Any], warps: int) -> str:
        """Run `kernel` on a block of `warps`; arrays are updated; return the sanitizer's words."""
        roots, records = describe(slots)
        head = struct.pack("<3q", self._index[kernel], warps, len(roots))
        buffers = [struct.pack("<q", root.nbytes) + root.tobytes() for root in roots]
        given = b"".join([head, *buffers, struct.pack("<q", len(slots)), *records])
        done = subprocess.run([str(self._program)], input=given, capture_output=True, check=False)
        said = done.stderr.decode()
        if "unexpected memory mapping" in said:
            pytest.skip("the thread sanitizer does not run with this kernel's address layout")
        at = 0
        for root in roots:
            data = np.frombuffer(done.stdout[at : at + root.nbytes], np.uint8)
            root.reshape(-1).view(np.uint8)[:] = data
            at += root.nbytes
        return said
