"""The toolchain: compiler choice, cache hits, failures in full, concurrent and killed builds."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.codegen.isa import generic
from dovetail.codegen.targets import TARGETS
from dovetail.codegen.toolchain import (
    BuildSpec,
    build_key,
    cached_build,
    compile_shared,
    find_compiler,
)
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import ToolchainError
from tests.full_disk import files_of_at_most

ROOT = Path(__file__).parents[2]
TARGET = generic.TARGET


def spec_of(text: str, **changes: object) -> BuildSpec:
    fields = {
        "name": "probe",
        "target": TARGET,
        "files": (("probe.c", text),),
    }
    return BuildSpec(**{**fields, **changes})


def fake_compiler(directory: Path, body: str) -> Path:
    """Write a shell script that stands for a compiler: answers --version, else runs `body`."""
    path = directory / "fakecc"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "fakecc 1.0"; exit 0; }}\n'
        f'for last; do :; done\n[ "$last" = -dumpmachine ] && {{ uname -m; exit 0; }}\n{body}\n'
    )
    path.chmod(0o755)
    return path


def child(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_built_library_runs_and_is_found_again(tmp_path):
    spec = spec_of("int answer(void) { return 42; }\n")
    path = compile_shared(spec, tmp_path)
    assert ctypes.CDLL(str(path)).answer() == 42
    stamp = path.stat().st_mtime_ns
    assert compile_shared(spec, tmp_path) == path
    assert path.stat().st_mtime_ns == stamp
    assert sorted(p.name for p in path.parent.iterdir()) == ["probe.c", "probe.so"]


def test_a_part_is_compiled_once_for_all_libraries_of_its_flags(tmp_path):
    for name, flags in (("a", ()), ("b", ()), ("c", ("-DX",))):
        one = "int one(void) { return 1; }\n"
        spec = spec_of(f"int {name}(void) {{ return 2; }}\n", name=name, parts=(one,), flags=flags)
        library = ctypes.CDLL(str(compile_shared(spec, tmp_path)))
        assert (library.one(), getattr(library, name)()) == (1, 2)
    assert len([*tmp_path.glob("*/*/unit.o")]) == 3 + 2


def test_only_texts_of_users_may_count_past_the_largest_integer(tmp_path):
    text = "int {}(int x) {{ return x + 1 > x; }}\n"
    spec = spec_of("", parts=(text.format("ours"),), foreign=(text.format("theirs"),))
    library = ctypes.CDLL(str(compile_shared(spec, tmp_path)))
    assert (library.ours(2**31 - 1), library.theirs(2**31 - 1)) == (1, 0)


def test_a_file_is_compiled_once_for_all_libraries_and_anew_for_another_header(tmp_path):
    for answer in (1, 1, 2):
        header = ("answer.h", f"#define ANSWER {answer}\n")
        file = ("answer.c", '#include "answer.h"\nint answer(void) { return ANSWER; }\n')
        part = f"int other{len([*tmp_path.glob('*/*/*.so')])}(void) {{ return 0; }}\n"
        spec = spec_of("", files=(file, header), parts=(part,))
        assert ctypes.CDLL(str(compile_shared(spec, tmp_path))).answer() == answer
    assert len([*tmp_path.glob("*/*/probe.so")]) == 3
    assert len([*tmp_path.glob("*/*/unit.o")]) == 3 + 2


def test_as_many_compilers_run_as_this_process_may_use_cpus(tmp_path):
    body = f'mkdir {tmp_path}/running || exit 9; gcc "$@" && rmdir {tmp_path}/running'
    code = """
        import os
        from dovetail.codegen.isa.generic import TARGET
        from dovetail.codegen.toolchain import BuildSpec, compile_shared
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        parts = tuple(f"int f{i}(void) {{ return 0; }}" for i in range(8))
        compile_shared(BuildSpec(name="probe", target=TARGET, parts=parts))
    """
    script = str(fake_compiler(tmp_path, body))
    builder = child(code, DOVETAIL_CC=script, DOVETAIL_CACHE=str(tmp_path / "cache"))
    builder.communicate()
    assert builder.returncode == 0


def test_every_input_changes_the_key():
    compiler = find_compiler(TARGET)
    base = spec_of("int x;\n", flags=("a", "b"))
    variants = [
        base,
        spec_of("int y;\n", flags=("a", "b")),
        spec_of("int x;\n", flags=("a b",)),
        spec_of("int x;\n", flags=("ab",)),
        spec_of("int x;\n", flags=("a", "b"), name="other"),
        spec_of("int x;\n", flags=("a", "b"), files=(("b.c", "int x;\n"),)),
        spec_of("int x;\n", flags=("a", "b"), parts=("int z;\n",)),
        spec_of("int x;\n", flags=("a", "b"), foreign=("int z;\n",)),
        spec_of("int x;\n", flags=("a", "b"), target=TARGETS["x86-64-avx2"]),
        spec_of("", files=(("probe.c", "int x;\n"), ("a.h", "")), flags=("a", "b")),
    ]
    keys = {build_key(v, compiler) for v in variants}
    keys.add(build_key(base, type(compiler)(compiler.command, compiler.kind, "another version")))
    assert len(keys) == len(variants) + 1


def test_failure_shows_the_command_and_all_of_stderr(tmp_path):
    with pytest.raises(ToolchainError) as caught:
        compile_shared(spec_of("int broken(void) { return nothing; }\n"), tmp_path)
    shown = str(caught.value)
    assert "command: " in shown
    assert "nothing" in shown
    assert caught.value.stderr.strip() in shown
    assert not list(tmp_path.rglob("*.so"))


def test_a_compiler_that_writes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CC", "true")
    with pytest.raises(ToolchainError, match=r"wrote no unit\.o"):
        compile_shared(spec_of("int x;\n"), tmp_path)


def test_failed_build_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CC", str(fake_compiler(tmp_path, "echo broken >&2; exit 3")))
    for _ in range(2):
        with pytest.raises(ToolchainError, match="exit status 3"):
            compile_shared(spec_of("int x;\n"), tmp_path)


def test_environment_chooses_the_compiler(tmp_path, monkeypatch):
    script = fake_compiler(tmp_path, "exit 0")
    monkeypatch.setenv("DOVETAIL_CC", f"{script} --driver-mode=x")
    assert find_compiler(TARGET).command == (str(script), "--driver-mode=x")
    for wrong, message in (("/nowhere/cc", "does not exist"), ("gcc '-O3", "No closing quotation")):
        monkeypatch.setenv("DOVETAIL_CC", wrong)
        with pytest.raises(ToolchainError, match=message):
            find_compiler(TARGET)


def test_environment_chooses_zig_by_its_name(tmp_path, monkeypatch):
    pytest.importorskip("ziglang")
    monkeypatch.setenv("DOVETAIL_CC", "zig")
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = find_compiler(TARGET)
    assert (compiler.command, compiler.kind) == ((sys.executable, "-m", "ziglang", "cc"), "zig")


def test_compiler_of_another_machine_is_passed_over(tmp_path, monkeypatch):
    pytest.importorskip("ziglang")
    monkeypatch.setenv("DOVETAIL_CC", str(fake_compiler(tmp_path, "exit 0")))
    foreign = next(t for t in TARGETS.values() if t.machine not in ("", platform.machine()))
    assert find_compiler(TARGET).machine == platform.machine()
    assert find_compiler(foreign).kind == "zig"


def test_zig_serves_without_a_compiler_on_path_and_for_other_machines(tmp_path, monkeypatch):
    pytest.importorskip("ziglang")
    monkeypatch.delenv("DOVETAIL_CC", raising=False)
    neon = TARGETS["aarch64-neon"]
    assert find_compiler(neon).kind in ("zig", "gcc", "clang")
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = find_compiler(TARGET)
    assert compiler.kind == "zig"
    assert "-target" in compiler.flags_for(TARGET)


def test_a_compiler_too_old_for_the_target_is_passed_over(tmp_path, monkeypatch):
    pytest.importorskip("ziglang")
    real = shutil.which("gcc")
    if real is None:
        pytest.skip("there is no gcc")
    monkeypatch.delenv("DOVETAIL_CC", raising=False)
    old = f'for flag in "$@"; do [ "$flag" = -mnews ] && exit 1; done; exec {real} "$@"'
    fake_compiler(tmp_path, old).rename(tmp_path / "gcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    newer = replace(TARGET, cflags=(*TARGET.cflags, "-mnews"))
    assert [find_compiler(target).kind for target in (TARGET, newer)] == ["gcc", "zig"]


def test_no_compiler_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("DOVETAIL_CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(
        ToolchainError, match=r"install gcc or clang, or zig \(pip install 'dovetail\[zig\]'\)"
    ):
        find_compiler(TARGET)
    foreign = next(t for t in TARGETS.values() if t.machine not in ("", platform.machine()))
    with pytest.raises(ToolchainError, match=f"{foreign.name}; pip install .* brings one, or set"):
        find_compiler(foreign)


def test_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    monkeypatch.delenv("DOVETAIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "dovetail"


def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolchainError, match="DOVETAIL_CACHE"):
        compile_shared(spec_of("int x;\n"), tmp_path / "file")


BUILD = """
    from dovetail.codegen.isa.generic import TARGET
    from dovetail.codegen.toolchain import BuildSpec, compile_shared
    print(compile_shared(BuildSpec(name="probe", target=TARGET,
        files=(("probe.c", "int answer(void) { return 7; }\\n"),))), flush=True)
"""


def test_two_processes_build_once(tmp_path):
    log = tmp_path / "log"
    script = fake_compiler(tmp_path, f'echo "$@" >> {log}; exec gcc "$@"')
    cache = tmp_path / "cache"
    children = [child(BUILD, DOVETAIL_CC=str(script), DOVETAIL_CACHE=str(cache)) for _ in range(2)]
    paths = {c.communicate()[0].strip() for c in children}
    assert len(paths) == 1
    assert ctypes.CDLL(paths.pop()).answer() == 7
    assert len(log.read_text().splitlines()) == 2  # one compile, one link


def test_killed_build_leaves_no_entry(tmp_path):
    """The compiler tells that it runs, then waits; its process group is killed; a retry works."""
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    script = fake_compiler(tmp_path, f"echo > probe.so; echo > {fifo}; read -r _ < {fifo}")
    cache = tmp_path / "cache"
    environment = {**os.environ, "DOVETAIL_CC": str(script), "DOVETAIL_CACHE": str(cache)}
    code = [sys.executable, "-P", "-c", textwrap.dedent(BUILD)]
    killed = subprocess.Popen(code, env=environment, start_new_session=True)
    fifo.read_text()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    entries = [p for p in cache.glob("??/*") if p.is_dir()]
    assert [p.suffix for p in entries] == [".tmp"] * 2, "a library's and its object's"
    script.write_text(script.read_text().rsplit("\n", 2)[0] + '\nexec gcc "$@"\n')
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=True)
    assert ctypes.CDLL(done.stdout.strip()).answer() == 7
    assert not list(cache.glob("??/*.tmp"))


def test_a_build_that_finds_a_full_disk_leaves_nothing_there(tmp_path):
    def build(work):
        (work / "half.so").write_bytes(bytes(100))
        (work / "probe.so").write_bytes(bytes(100_000))

    said = "cannot write the build cache .*: File too large; set DOVETAIL_CACHE"
    with files_of_at_most(50_000), pytest.raises(ToolchainError, match=said):
        cached_build("abcdef", "probe.so", tmp_path, build)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
