"""Two processes that need the same model of one cache: one compiles it, both have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.runtime.verify import verify_artifact
from dovetail.tiny_world import LLAMA
from tests.caches import link_cache

FIND = """
import sys
from pathlib import Path
from dovetail.cli.model_cache import find_artifact
sys.stdin.read(1)  # until all have started
print(find_artifact(Path(sys.argv[1]), {}))
"""
COMPILE = "import sys; sys.stdin.read(1); from dovetail.cli import main; main()"


def run_together(commands: list[list[str]], cache: Path) -> list[tuple[int, str, str]]:
    """Start all, let them go on together, and return exit code, output and errors of each."""
    env = {**os.environ, "DOVETAIL_CACHE": str(cache)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen([sys.executable, "-P", "-c", *command], env=env, text=True, **pipes)
        for command in commands
    ]
    for process in started:
        process.stdin.write("x")
        process.stdin.flush()
    said = [process.communicate() for process in started]
    return [(p.returncode, *texts) for p, texts in zip(started, said, strict=True)]


@pytest.mark.long
def test_two_servers_on_one_cache_compile_a_model_once(tmp_path: Path) -> None:
    cache = link_cache(tmp_path)
    found = run_together([[FIND, str(LLAMA)]] * 3, cache)
    assert [code for code, _, _ in found] == [0, 0, 0], found
    (path,) = {out.strip() for _, out, _ in found}
    assert sum("dovetail: compiling" in err for _, _, err in found) == 1
    assert sum("another process compiles llama" in err for _, _, err in found) == 2
    assert verify_artifact(path).ok
    made = [file.name for file in (cache / "models").iterdir() if not file.name.endswith(".lock")]
    assert made == [Path(path).name], "nothing half-made lies beside it"


def test_two_compiles_into_one_place_both_end_well(tmp_path: Path) -> None:
    cache, output = link_cache(tmp_path), tmp_path / "app.dove"
    command = [COMPILE, "compile", str(LLAMA), "-o", str(output), "--effort", "none"]
    done = run_together([command] * 2, cache)
    assert [code for code, _, _ in done] == [0, 0], done
    assert verify_artifact(output).ok
    assert [file.name for file in tmp_path.glob("*app.dove*")] == ["app.dove"]
