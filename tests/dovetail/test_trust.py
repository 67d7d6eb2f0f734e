"""Whose code an artifact runs, and when: nothing of it to look at it, and never without a word."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir import trust
from dovetail.ir.artifact import FileEntry, KernelIndex
from dovetail.loading import load, open_ready
from dovetail.runtime.artifact import ArtifactReader
from dovetail.runtime.machine.abi import ABI, PROTOTYPES
from dovetail.runtime.machine.trust import is_known_folder
from dovetail.runtime.verify import verify_artifact
from dovetail.tiny_world import LLAMA
from dovetail.topology.hardware import read_hardware
from tests.caches import link_cache
from tests.dovetail.commands import assert_one_sentence, dovetail

WORKFLOW = """
from dovetail import END, START, RAGraph

{first}

g = RAGraph("own")
g.add_function(0, lambda state: state["input"].upper(), output="loud")
g.add_edge(START, 0)
g.add_edge(0, END)
"""
COMMAND = "from dovetail.cli import main; main()"
CONSTRUCTOR = """
#include <stdio.h>
__attribute__((constructor)) static void leave_a_trace(void) {{ fclose(fopen("{trace}", "w")); }}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, with the kernels that have been built."""
    cache = link_cache(tmp_path)
    monkeypatch.setenv("DOVETAIL_CACHE", str(cache))
    monkeypatch.delenv("DOVETAIL_TRUST", raising=False)
    return cache


@pytest.fixture
def made(cache: Path, tmp_path: Path) -> Path:
    """An artifact made here, with a workflow that is code."""
    (tmp_path / "own.py").write_text(WORKFLOW.format(first=""))
    path = tmp_path / "app.dove"
    compile_model(LLAMA, output=path, effort="none", workflows=[tmp_path / "own.py"])
    return path


@pytest.fixture
def elsewhere(made: Path, cache: Path) -> Path:
    """The same, as if another user had made it."""
    shutil.rmtree(cache / "trust")
    return made


def reseal(path: Path) -> None:
    """List all files anew, as whoever makes an artifact can."""
    manifest, files = ArtifactReader(path).manifest, {}
    for file in sorted(f for f in path.rglob("*") if f.is_file() and f.name != "manifest.json"):
        data = file.read_bytes()
        hashed = None if file.name == "weights.bin" else hashlib.sha256(data).hexdigest()
        files[file.relative_to(path).as_posix()] = FileEntry(bytes=len(data), sha256=hashed)
    changed = msgspec.structs.replace(manifest, files=files)
    (path / "manifest.json").write_bytes(msgspec.json.encode(changed))


@pytest.fixture
def hostile(elsewhere: Path, tmp_path: Path) -> tuple[Path, Path]:
    """An artifact whose library and Python file leave a trace as soon as they are loaded."""
    trace = tmp_path / "trace"
    (elsewhere / "graph/own.py").write_text(
        WORKFLOW.format(first=f"open({str(trace)!r}, 'w').close()")
    )
    folder = elsewhere / "kernels" / ArtifactReader(elsewhere).manifest.targets[0]
    index = msgspec.json.decode((folder / "index.json").read_bytes(), type=KernelIndex)
    functions = [f"long {name}(void) {{ return {ABI}; }}" for name in PROTOTYPES]
    functions += [f"void dt_entry_{kernel.name}(void) {{}}" for kernel in index.kernels]
    source = tmp_path / "evil.c"
    source.write_text(CONSTRUCTOR.format(trace=trace) + "\n".join(functions) + "\n")
    built = ["gcc", "-shared", "-fPIC", "-o", str(folder / "kernels.so"), str(source)]
    subprocess.run(built, check=True)
    own = tuple(msgspec.structs.replace(kernel, shared="") for kernel in index.kernels)
    changed = msgspec.structs.replace(index, library="kernels.so", kernels=own)
    (folder / "index.json").write_bytes(msgspec.json.encode(changed))
    reseal(elsewhere)
    return elsewhere, trace


def test_what_looks_at_an_artifact_runs_nothing_of_it(hostile: tuple[Path, Path]) -> None:
    path, trace = hostile
    verified = dovetail("verify", path)
    assert verified.code == 0 and "compatible with this machine" in verified.out, verified
    assert dovetail("inspect", path).code == 0
    assert not trace.exists()
    open_ready(path, read_hardware(), trust=True).open_kernels()
    assert trace.exists(), "or else the library would have told nothing"


def test_a_library_that_lacks_a_kernel_is_found_by_its_table(hostile: tuple[Path, Path]) -> None:
    path, trace = hostile
    folder = path / "kernels" / ArtifactReader(path).manifest.targets[0]
    index = msgspec.json.decode((folder / "index.json").read_bytes(), type=KernelIndex)
    ghost = msgspec.structs.replace(index.kernels[0], name="ghost")
    changed = msgspec.structs.replace(index, kernels=(*index.kernels, ghost))
    (folder / "index.json").write_bytes(msgspec.json.encode(changed))
    reseal(path)
    assert "lacks the kernel 'ghost'" in verify_artifact(path).faults[0]
    whole = (folder / "kernels.so").read_bytes()
    for damaged in (b"", b"\x7fELF", whole[:4000], bytes(len(whole)), whole[:40] + b"\xff" * 24):
        (folder / "kernels.so").write_bytes(damaged)
        reseal(path)
        (fault,) = verify_artifact(path).faults
        assert "kernels.so: cannot be loaded (" in fault and "\n" not in fault
    assert not trace.exists()


def test_what_is_made_here_loads_without_a_word(
    made: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "copy.dove")
    shutil.move(tmp_path / "copy.dove", tmp_path / "moved.dove")
    for path in (made, tmp_path / "moved.dove"):
        with load(path, threads=1):
            pass
    open_ready(made, read_hardware())
    assert "was not made here" not in caplog.text


def test_the_first_load_of_another_says_what_it_means(
    elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verify_artifact(elsewhere)
    assert "was not made here" not in caplog.text
    for _ in range(2):
        with load(elsewhere, threads=1):
            pass
    (said,) = (r for r in caplog.records if "was not made here" in r.getMessage())
    assert said.levelno == logging.WARNING and "\n" not in said.getMessage()
    assert str(elsewhere) in said.getMessage() and "Python" in said.getMessage()


def said_of_the_artifact(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What a command wrote beside its answer; other work on the machine is left out."""
    return [line for line in done.stderr.splitlines() if "busy with other processes" not in line]


def test_the_word_is_one_line_of_a_command(elsewhere: Path) -> None:
    asked = ("run", elsewhere, "--workflow", "own", "--input", "a", "--threads", 1)
    command = [sys.executable, "-P", "-c", COMMAND, *map(str, asked)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)
    )
    assert first.stdout == second.stdout == "A\n"
    first_said, second_said = map(said_of_the_artifact, (first, second))
    assert len(first_said) == 1 and "was not made here" in first_said[0]
    assert second_said == []


@pytest.mark.parametrize("how", ["flag", "environment", "argument"])
def test_trust_silences_the_word(
    how: str, elsewhere: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("DOVETAIL_TRUST", "1")
    if how == "argument":
        load(elsewhere, threads=1, trust=True).close()
    else:
        flags = ["--trust"] * (how == "flag")
        done = dovetail("run", elsewhere, "--prompt-ids", "1,2", "--max-tokens", 1, *flags)
        assert done.code == 0, done
    assert "was not made here" not in caplog.text
    assert is_known_folder(elsewhere), "it is remembered"


def test_compiling_anew_what_came_from_elsewhere_does_not_make_it_ours(
    elsewhere: Path, tmp_path: Path
) -> None:
    compile_model(elsewhere, output=tmp_path / "anew.dove", effort="none")
    assert not is_known_folder(tmp_path / "anew.dove"), "its Python is still of others"
    load(elsewhere, threads=1, trust=True).close()
    compile_model(elsewhere, output=tmp_path / "anew.dove", effort="none")
    assert is_known_folder(tmp_path / "anew.dove")


def test_the_key_is_private_and_one_however_many_make_it(cache: Path) -> None:
    folder = cache / "trust"
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: trust._make_key(), range(64)))
    (key,) = folder.glob("*/key")
    assert keys == {key.read_bytes()} and len(key.read_bytes()) == trust.KEY_BYTES
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [file.name for file in key.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("harm", ["readable", "short", "link"])
def test_a_key_that_others_may_have_seen_is_replaced_and_its_marks_are_void(
    harm: str, cache: Path, tmp_path: Path
) -> None:
    trust.remember(b"manifest")
    assert trust.is_known(b"manifest") and not trust.is_known(b"manifest ")
    (key,) = (cache / "trust").glob("*/key")
    if harm == "readable":
        key.chmod(0o644)
    elif harm == "short":
        key.write_bytes(b"x")
    else:
        shutil.move(key, tmp_path / "key")
        key.symlink_to(tmp_path / "key")
    assert not trust.is_known(b"manifest")
    trust.remember(b"manifest")
    assert trust.is_known(b"manifest") and stat.S_IMODE(key.lstat().st_mode) == 0o600


def test_without_a_cache_nothing_is_known_and_all_works(
    elsewhere: Path, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    (cache / "trust").write_bytes(b"no folder")
    for _ in range(2):
        load(elsewhere, threads=1).close()
    assert caplog.text.count("was not made here") == 2


def test_a_pipe_for_a_manifest_is_refused_by_every_verb(tmp_path: Path) -> None:
    (tmp_path / "app.dove").mkdir()
    os.mkfifo(tmp_path / "app.dove/manifest.json")
    for verb in (("inspect",), ("serve",), ("run", "--prompt", "x"), ("bench", "perplexity")):
        rest = [tmp_path / "app.dove", *([__file__] if "perplexity" in verb else [])]
        assert_one_sentence(dovetail(*verb, *rest))
    assert dovetail("verify", tmp_path / "app.dove").code == 1
