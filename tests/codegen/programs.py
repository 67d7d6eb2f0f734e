"""Static programs of any target, which an emulator runs: C text in, the program's path out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dovetail.codegen.isa.target import Target
from dovetail.codegen.toolchain import cached_build, content_key, find_compiler, run_tool
from dovetail.ir.cache import cache_directory

NAME, SOURCE, OBJECT = "program", "program.c", "program.o"


def build_program(
    target: Target, text: str, cache: Path | None = None, flags: Sequence[str] = ()
) -> Path:
    """Return the program of a C text with `main`, from the build cache where it is there already.

    zig links statically with musl only, of which it would build one for each CPU: half a minute.
    """
    compiler = find_compiler(target)
    system = target.zig_target.split("-gnu")[0] + "-musl"
    selected = compiler.flags_for(target)
    options = [*(system if o == target.zig_target else o for o in selected), *flags]
    linked = [option for option in options if not option.startswith("-mcpu=")]
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_directory() / "zig")}

    def build(work: Path) -> None:
        (work / SOURCE).write_text(text, encoding="utf-8")
        for arguments in (
            (*options, "-c", SOURCE, "-o", OBJECT),
            (*linked, "-static", OBJECT, "-lm", "-o", NAME),
        ):
            run_tool((*compiler.command, *arguments), work, "the compiler failed", environment)

    return cached_build(content_key([compiler.version, options, text]), NAME, cache, build)
