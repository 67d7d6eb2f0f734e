"""`dovetail cache`: what is listed and cleared, and what is kept since a process holds it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import msgspec
import pytest

from dovetail.cli.model_cache import find_artifact
from dovetail.ir.artifact import Manifest
from dovetail.ir.cache import cache_directory, use_cache
from dovetail.loading import load
from dovetail.tiny_world import LLAMA
from tests.dovetail.commands import Result, assert_one_sentence, dovetail

HOLD = """
import sys
import dovetail
with dovetail.load(sys.argv[1], apart=True):
    print("loaded", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with a model, its kernels, and what else compiles leave."""
    cache, built = tmp_path_factory.mktemp("cache"), cache_directory()
    find_artifact(LLAMA, {})  # so that its kernels are there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOVETAIL_CACHE", str(cache))
        subprocess.run(["cp", "-r", str(built / "kernels"), cache], check=True)
        (cache / "text").mkdir()
        find_artifact(LLAMA, {})
        for name in (
            "models/encoder-0123456789abcdef.dove/manifest.json",
            "ab/abcd/kernels.so",
            "answers/a.json",
            "profiles/1/profile.json",
        ):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            (cache / name).write_bytes(bytes(1000))
        (cache / "tuning.jsonl").write_bytes(b"")
        yield cache


def names(entries: list[dict[str, object]]) -> set[object]:
    return {entry["name"] for entry in entries}


def read(result: Result) -> dict[str, list[dict[str, object]]]:
    assert result.code == 0, result
    found: dict[str, list[dict[str, object]]] = json.loads(result.out)
    return found


def test_what_a_process_holds_is_listed_and_kept(filled: Path) -> None:
    llama = find_artifact(LLAMA, {})
    before = read(dovetail("cache", "list", "--json"))
    targets = {folder.name for folder in (filled / "kernels").iterdir() if folder.is_dir()}
    assert names(before["entries"]) >= {"llama", "encoder", *targets, "builds", "profiles"}
    assert not any(entry["held"] for entry in before["entries"])
    (shown,) = (entry for entry in before["entries"] if entry["name"] == "llama")
    assert shown["bytes"] == sum(f.stat().st_size for f in llama.rglob("*") if f.is_file())
    assert "llama" in (text := dovetail("cache", "list").out) and "in use" not in text
    command = [sys.executable, "-P", "-c", HOLD, str(llama)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "loaded\n"
        assert "in use" in dovetail("cache", "list").out
        done = read(dovetail("cache", "clear", "all", "--yes", "--json"))
        kernels = json.loads((llama / "manifest.json").read_bytes())["targets"]
        assert names(done["kept"]) == {"llama", *kernels}
        assert names(done["removed"]) >= {"encoder", "builds", "profiles", "tuning"}
        assert llama.is_dir()
        process.stdin.close()
    left = sorted(path.name for path in filled.iterdir())
    assert [name for name in left if name != "trust"] == ["kernels", "models"]
    assert names(read(dovetail("cache", "clear", "llama", "--yes", "--json"))["removed"]) == {
        "llama"
    }
    assert list((filled / "models").iterdir()) == []


def test_compiles_hold_all_that_was_built_and_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    for name in ("models/org/one-0123456789abcdef.dove", "models/two-0123456789abcdef.tuned.dove"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights.bin").write_bytes(bytes(9))
    for name in ("text/a.json", "tuning.jsonl", "kernels/generic/a.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    one = tmp_path / "models/org/one-0123456789abcdef.dove"
    clear = ("cache", "clear", "all", "--yes", "--json")
    with use_cache(), filelock.FileLock(f"{one}.lock"):
        done = read(dovetail(*clear))
    assert names(done["removed"]) == {"two"}
    assert names(done["kept"]) == {"org/one", "builds", "tuning", "generic"}
    assert_one_sentence(dovetail("cache", "clear", "org/one"))  # no terminal to ask on
    assert_one_sentence(dovetail("cache", "clear", "three", "--yes"))
    assert one.is_dir()
    assert names(read(dovetail(*clear))["removed"]) == names(done["kept"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert "nothing to remove" in dovetail("cache", "clear", "all", "--yes").out


def test_builds_of_one_model_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    builds = [
        ("a" * 16, "/m/llama", ["--effort=none"], "generic"),
        ("b" * 16, "/m/llama", ["--effort=none", "--weight-dtype=int8"], "generic"),
        ("c" * 16, "/adapters/llama", ["--effort=none"], "x86-64-avx2"),
    ]
    for at, (key, source, flags, target) in enumerate(builds):
        write_manifest(tmp_path / f"models/llama-{key}.dove", source, flags, target, at)
    write_manifest(tmp_path / f"models/other-{'d' * 16}.dove", "/m/other", [], "generic", 4)
    lines = [line for line in dovetail("cache", "list").out.splitlines() if "models" in line]
    assert len(lines) == 4
    assert "generic, /m/llama" in lines[0] and "weight" not in lines[0]
    assert "generic, weight-dtype int8, /m/llama" in lines[1]
    assert "x86-64-avx2, /adapters/llama" in lines[2] and "effort" not in "".join(lines)
    assert "generic" not in lines[3] and "compiled" not in lines[3]
    write_manifest(tmp_path / f"models/other-{'e' * 16}.dove", "/m/other", [], "generic", 5)
    others = [line for line in dovetail("cache", "list").out.splitlines() if "other" in line]
    assert ["compiled 2026-01-04" in line for line in others] == [True, False]


def write_manifest(folder: Path, source: str, flags: list[str], target: str, day: int) -> None:
    folder.mkdir(parents=True)
    manifest = Manifest(
        producer="dovetail",
        created=f"2026-01-{day:02}T00:00:00+00:00",
        model_fingerprint="",
        workload_fingerprint="",
        targets=(target,),
        models=("llm",),
        command=("dovetail", "compile", source, "-o", str(folder), *flags),
        effort="none",
        files={},
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def test_a_use_is_remembered_and_an_empty_cache_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "none"))
    assert read(dovetail("cache", "list", "--json"))["entries"] == []
    assert dovetail("cache", "clear", "all", "--yes").out == "nothing to remove\n"


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [(b"n\n", 2, "nothing was removed"), (b"\x04", 2, "interrupted"), (b"y\n", 0, "")],
)
def test_on_a_terminal_a_user_is_asked_first(
    tmp_path: Path, typed: bytes, code: int, said: str
) -> None:
    kernel = tmp_path / "kernels/generic/a.so"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"x")
    command = [sys.executable, "-P", "-c", "from dovetail.cli import main; main()"]
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    done = subprocess.run(
        [*command, "cache", "clear", "all"],
        env={**os.environ, "DOVETAIL_CACHE": str(tmp_path)},
        stdin=theirs,
        capture_output=True,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, kernel.exists()) == (code, code != 0), done.stderr
    assert said in done.stderr.decode() and b"Traceback" not in done.stderr


def test_a_model_that_is_asked_for_again_was_used(filled: Path) -> None:
    artifact = find_artifact(LLAMA, {})
    for file in (artifact, *artifact.rglob("*")):
        os.utime(file, (0, 0))
    assert find_artifact(LLAMA, {}) == artifact
    with load(LLAMA) as app:  # a model is compiled into the cache, as `run` does it
        assert app.artifact.path == artifact
    used = [e["used"] for e in read(dovetail("cache", "list", "--json"))["entries"]]
    assert min(map(str, used)) > "2000"
