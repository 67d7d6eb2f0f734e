"""A compile that a command has begun ends with the command, and leaves nothing half-made."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from dovetail.cli.compile_child import CompileChild
from dovetail.cli.model_cache import find_artifact
from dovetail.tiny_world import LLAMA
from tests.caches import link_cache

STALL = """
import os, signal
from dovetail.compiler.write.writer import ArtifactWriter
def seal(*_, **__):
    with open(os.environ["BEGUN"], "w") as begun: begun.write(str(os.getpid()))
    while True: signal.pause()
ArtifactWriter.seal = seal
"""
"""The child stops where everything is written and nothing in its place, and tells."""
SERVE = f"""
from dovetail.cli import compile_child, main
compile_child.PROGRAM = {STALL!r} + compile_child.PROGRAM
main()
"""


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM, signal.SIGKILL],
)
def test_a_server_that_ends_as_it_compiles_leaves_nothing(tmp_path: Path, number: int) -> None:
    cache, begun = link_cache(tmp_path), tmp_path / "begun"
    os.mkfifo(begun)
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE, "serve", str(LLAMA), "--port", "0"],
        env={**os.environ, "DOVETAIL_CACHE": str(cache), "BEGUN": str(begun)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    with server.stderr:
        child = os.pidfd_open(int(begun.read_text()))
        assert half_made(cache)
        server.send_signal(number)
        said = server.stderr.read()  # until all that write there have ended
    select.select([child], [], [])  # readable once it has ended
    os.close(child)
    assert server.wait(60) == (-number if number == signal.SIGKILL else 2)
    assert not half_made(cache) and "Traceback" not in said
    if number != signal.SIGKILL:
        assert "nothing half-made was left behind" in said.splitlines()[-1]


def half_made(cache: Path) -> list[Path]:
    return list((cache / "models").glob(".*.partial"))


def test_the_next_start_removes_what_a_killed_compile_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any model, and also where there is nothing to compile."""
    cache = link_cache(tmp_path)
    monkeypatch.setenv("DOVETAIL_CACHE", str(cache))
    artifact = find_artifact(LLAMA, {})
    (cache / "models/.other.dove.1.partial/models").mkdir(parents=True)
    assert find_artifact(LLAMA, {}) == artifact
    assert not half_made(cache) and artifact.is_dir()


def test_a_notebook_that_captures_what_is_said_compiles(tmp_path: Path) -> None:
    """What it puts in the place of stderr has no descriptor."""
    with redirect_stderr(StringIO()):
        assert CompileChild((sys.executable, "-c", "pass"), tmp_path / "app.dove").wait() == 0
