"""C text to shared library: a compiler and a content-addressed, locked, atomic build cache.

In: a `BuildSpec`. Out: the library's path, or `ToolchainError` with the command and full stderr.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from dovetail.codegen.isa.target import Target
from dovetail.ir.cache import cache_directory, use_cache
from dovetail.ir.errors import ToolchainError, install

COMPILE_TIMEOUT = 600  # seconds; a compiler that takes longer hangs
ZIG = "zig"
FOREIGN_FLAGS = ("-fno-strict-aliasing", "-fwrapv")
"""For kernels of users: what was lifted from C reads memory as other types, and wraps around."""
PART, OBJECT = "unit.c", "unit.o"
"""Names of every part and its object in its cache entry: debuggers see them."""
ADVICE = f"install gcc or clang, or zig ({install('zig')}), or set DOVETAIL_CC to a C compiler"


Advance: TypeAlias = Callable[[int, int], None]
"""Hears how much of a library is made, and of how much."""


def unheard(_done: int, _total: int) -> None:
    """Be an Advance for nobody."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler: the command it starts with, its kind (gcc, clang, zig) and version line.

    `machine` is what it builds for, as `uname -m` spells it; empty for zig, which builds for all.
    """

    command: tuple[str, ...]
    kind: str
    version: str
    machine: str = ""

    def flags_for(self, target: Target) -> tuple[str, ...]:
        """Return the flags that select the target; zig would build for the very host."""
        if self.kind != "zig":
            return (*target.cflags, *OWN_FLAGS.get(self.kind, ()))
        plain = (flag for flag in target.cflags if not flag.startswith("-march="))
        cpu = (f"-mcpu={target.zig_cpu}",) if target.zig_cpu else ()
        return ("-target", target.zig_target, *plain, *cpu, "-fno-sanitize=undefined", "-g0")


OWN_FLAGS = {"gcc": ("-fno-tree-ter", "-fno-tree-reassoc")}
"""Kind of compiler to flags that it alone knows. gcc would move products in front of their sums,
and add integers in another order: both fill registers and spill (a tile of 4 x 1 with 4-bit weights
on AVX2: 268 instead of 339 instructions for 64 products of quads)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """One shared library.

    `files` are (name, text) of sources, and of headers (.h) that they include. `parts` are C texts
    that include none of the files, `foreign` those of kernels of users, which have flags of their
    own. The object of each serves every library.
    """

    name: str
    target: Target
    files: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def find_compiler(target: Target) -> Compiler:
    """Return the compiler for `target`: $DOVETAIL_CC, gcc or clang on PATH, the zig wheel.

    One that builds for another machine than the target's, or is too old to know the target's
    instructions, is passed over; zig builds for all.
    """
    chosen = os.environ.get("DOVETAIL_CC", "").strip()
    if chosen:
        compiler = _identify(_command(chosen))
        if compiler.machine in ("", target.machine or platform.machine()):
            return compiler
    host = target.machine in ("", platform.machine())
    if host:
        for name in ("gcc", "clang"):
            path = shutil.which(name)
            if path is not None:
                compiler = _identify((path,))
                if _knows(compiler, target.cflags):
                    return compiler
    if find_spec("ziglang") is not None:
        return _identify(_command(ZIG))
    advice = ADVICE if host else f"{install('zig')} brings one, or set DOVETAIL_CC to one that does"
    raise ToolchainError(f"no C compiler was found that builds for {target.name}; {advice}")


def _command(chosen: str) -> tuple[str, ...]:
    """Return the command of $DOVETAIL_CC; plain `zig` is zig's C compiler, of PATH or the wheel."""
    if chosen != ZIG:
        try:
            return tuple(shlex.split(chosen))
        except ValueError as error:
            raise ToolchainError(f"DOVETAIL_CC={chosen} is no command: {error}; {ADVICE}") from None
    if shutil.which(ZIG) is None and find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    return (ZIG, "cc")


def _identify(command: tuple[str, ...]) -> Compiler:
    path = shutil.which(command[0])
    if path is None:
        raise ToolchainError(f"the C compiler {command[0]!r} does not exist; {ADVICE}", command)
    return _identified(command, Path(path).stat().st_mtime_ns)


@lru_cache
def _identified(command: tuple[str, ...], _modified: int) -> Compiler:
    zig = command[-1] == "cc" and "zig" in " ".join(command)
    ask = (*command[:-1], "version") if zig else (*command, "--version")
    text = run_tool(ask, None, "the C compiler does not tell its version").strip()
    version = text.splitlines()[0] if text else "unknown"
    if zig:
        return Compiler(command, "zig", f"zig {version}")
    triple = run_tool((*command, "-dumpmachine"), None, "the C compiler does not tell its target")
    machine = triple.strip().partition("-")[0]
    return Compiler(command, "clang" if "clang" in text else "gcc", version, machine)


@lru_cache
def _knows(compiler: Compiler, flags: tuple[str, ...]) -> bool:
    try:
        ask = (*compiler.command, *flags, "-fsyntax-only", "-x", "c", os.devnull)
        run_tool(ask, None, "the C compiler does not know the target")
    except ToolchainError:
        return False
    return True


def build_key(spec: BuildSpec, compiler: Compiler) -> str:
    """Return the sha256 of everything the result depends on, as canonical JSON."""
    made_by = _made_by(compiler, _flags(spec, compiler))
    foreign = [*FOREIGN_FLAGS, *spec.foreign] if spec.foreign else []
    return content_key([made_by, spec.target.name, spec.name, spec.files, spec.parts, foreign])


def content_key(content: Any) -> str:
    """Return the sha256 of JSON-like content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def compile_shared(spec: BuildSpec, cache: Path | None = None, advance: Advance = unheard) -> Path:
    """Return the built library, from the cache where it is there already."""
    compiler = find_compiler(spec.target)
    key, name = build_key(spec, compiler), f"{spec.name}.so"
    return cached_build(key, name, cache, lambda work: _build(spec, compiler, work, cache, advance))


def cached_build(key: str, name: str, cache: Path | None, build: Callable[[Path], None]) -> Path:
    """Return the file `name` of cache entry `key`, which `build` makes in an empty directory.

    Processes that want the same entry wait for the first one's build. It goes to a temporary
    directory that is renamed when complete, so a killed one leaves no entry.
    """
    root = (cache_directory() if cache is None else cache).absolute()
    entry = root / key[:2] / key
    result = entry / name
    if result.exists():
        return result
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with use_cache(root), FileLock(f"{entry}.lock"):
            if not result.exists():
                _fill_entry(entry, name, build)
    except OSError as error:
        raise ToolchainError(
            f"cannot write the build cache {root}: {error.strerror or error}; set DOVETAIL_CACHE "
            "to another directory"
        ) from error
    return result


def _fill_entry(entry: Path, name: str, build: Callable[[Path], None]) -> None:
    """Build in `<entry>.tmp`, which only the holder of the lock touches, then rename."""
    work = entry.with_name(f"{entry.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        build(work)
        if not (work / name).exists():
            raise ToolchainError(f"the compiler wrote no {name}, and no error either")
        shutil.rmtree(entry, ignore_errors=True)
        work.rename(entry)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)  # on a full disk it would take the last room
        raise


def _build(
    spec: BuildSpec, compiler: Compiler, work: Path, cache: Path | None, advance: Advance
) -> None:
    flags = _flags(spec, compiler)
    environment = {
        **os.environ,
        "ZIG_GLOBAL_CACHE_DIR": str(cache_directory() / "zig"),
        "LC_ALL": "C",
    }

    def run(folder: Path, *arguments: str) -> None:
        command = (*compiler.command, *arguments)
        run_tool(command, folder, "the C compiler failed", environment)

    headers = [file for file in spec.files if file[0].endswith(".h")]
    files = [file for file in spec.files if file not in headers]
    foreign = set(spec.foreign)

    def compile_source(source: tuple[str, str]) -> str:
        """Return the object of a file or a part, from the cache where it is there already."""
        read = (source, *(headers if source in files else ()))
        own = (*flags, *(FOREIGN_FLAGS if source[1] in foreign else ()))

        def build(folder: Path) -> None:
            _write(folder, read)
            run(folder, *own, "-c", source[0], "-o", OBJECT)
            for name, _ in read:
                (folder / name).unlink()

        key = content_key([OBJECT, _made_by(compiler, own), read])
        return str(cached_build(key, OBJECT, cache, build))

    _write(work, spec.files)
    sources = [*((PART, text) for text in (*spec.parts, *spec.foreign)), *files]
    longest_first = sorted(sources, key=lambda source: -len(source[1]))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {pool.submit(compile_source, source): source for source in longest_first}
        made, done = dict[tuple[str, str], str](), 0
        try:
            for job in as_completed(jobs):
                made[jobs[job]] = job.result()
                done += len(jobs[job][1])
                advance(done, sum(len(text) for _, text in sources))
        finally:
            for job in jobs:
                job.cancel()
    objects = [made[source] for source in sources]
    run(work, *flags, "-shared", "-Wl,-z,defs", *objects, "-lm", "-o", f"{spec.name}.so")


def _write(folder: Path, files: Sequence[tuple[str, str]]) -> None:
    for name, text in files:
        (folder / name).write_text(text, encoding="utf-8")


def _flags(spec: BuildSpec, compiler: Compiler) -> tuple[str, ...]:
    return (*compiler.flags_for(spec.target), *spec.flags)


def _made_by(compiler: Compiler, flags: tuple[str, ...]) -> list[object]:
    return [compiler.command, compiler.kind, compiler.version, flags]


def run_tool(
    command: Sequence[str],
    work: Path | None,
    failure: str,
    environment: Mapping[str, str] | None = None,
    advice: str = ADVICE,
) -> str:
    """Run a command and return its stdout; ToolchainError with its stderr when it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(f"{failure}: no result in {COMPILE_TIMEOUT} s", command) from error
    except OSError as error:
        raise ToolchainError(f"{failure}: {error}; {advice}", command) from error
    if done.returncode != 0:
        raise ToolchainError(
            f"{failure} with exit status {done.returncode}", command, done.stderr or done.stdout
        )
    return done.stdout
