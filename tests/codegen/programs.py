"""Static programs of any target, which an emulator runs: C text in, the program's path out.

A text with `main` reads and writes by STREAMS alone, so it needs no C library: zig would build the
one of another machine first, which takes a minute and a half of CPU time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dovetail.codegen.isa.target import Target
from dovetail.codegen.toolchain import cached_build, content_key, find_compiler, run_tool
from dovetail.ir.cache import cache_directory

NAME, SOURCE, OBJECT = "program", "program.c", "program.o"
STREAMS = """
#include <stddef.h>
#include <unistd.h>

static void take(void *to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    ssize_t got = read(0, (char *)to + done, bytes - done);
    if (got <= 0) _exit(0);
    done += (size_t)got;
  }
}

static void give(const void *from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    ssize_t put = write(1, (const char *)from + done, bytes - done);
    if (put <= 0) _exit(2);
    done += (size_t)put;
  }
}
"""
"""`take` fills memory from stdin, at whose end the program ends; `give` writes to stdout."""
FREESTANDING = """
static long system_call(long number, long first, const void *second, size_t third) {
  register long x8 __asm__("x8") = number, x0 __asm__("x0") = first;
  register const void *x1 __asm__("x1") = second;
  register size_t x2 __asm__("x2") = third;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}

ssize_t read(int file, void *to, size_t bytes) { return system_call(63, file, to, bytes); }
ssize_t write(int file, const void *from, size_t bytes) {
  return system_call(64, file, from, bytes);
}
void _exit(int status) {
  for (;;) system_call(94, status, 0, 0);
}
void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) ((char *)to)[i] = ((const char *)from)[i];
  return to;
}
void *memset(void *to, int byte, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) ((char *)to)[i] = (char)byte;
  return to;
}
void _start(void) { _exit(main()); }
"""
"""What stands in for the C library on aarch64 Linux."""


def build_program(
    target: Target, text: str, cache: Path | None = None, flags: Sequence[str] = ()
) -> Path:
    """Return the program of a C text with `main`, from the build cache where it is already."""
    compiler, bare = find_compiler(target), target.machine == "aarch64"
    options = [*compiler.flags_for(target), *flags, *("-fno-stack-protector",) * bare]
    text += FREESTANDING * bare
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_directory() / "zig")}

    def build(work: Path) -> None:
        (work / SOURCE).write_text(text, encoding="utf-8")
        for arguments in (
            (*options, "-c", SOURCE, "-o", OBJECT),
            (*options, "-static", *("-nostdlib",) * bare, OBJECT, "-o", NAME),
        ):
            run_tool((*compiler.command, *arguments), work, "the compiler failed", environment)

    return cached_build(content_key([compiler.version, options, text]), NAME, cache, build)
