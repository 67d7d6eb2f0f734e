"""What README.md shows works: its runnable blocks run in order, its `make` targets exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"<!-- (runnable|file: (\S+)) -->\n```(\w+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the examples the README speaks of, and `dovetail` in `bin`."""
    work = tmp_path_factory.mktemp("readme")
    (work / "examples").symlink_to(ROOT / "examples")
    script = work / "bin/dovetail"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable} -P\nfrom dovetail.cli import main\nmain()\n")
    script.chmod(0o755)
    return work


def test_blocks_run_as_they_stand(folder: Path) -> None:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ran = []
    for _, file, language, text in BLOCK.findall(README):
        if file:
            (folder / file).write_text(text)
            continue
        command = ["sh", "-e"] if language == "sh" else [sys.executable, "-P", "-"]
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PATH": path},
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        ran.append(language)
    assert ran == ["sh", "python", "python", "sh"]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", README))
    assert {"quickstart", "test", "test-long"} <= named <= targets


def test_ci_runs_the_command_the_readme_names() -> None:
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
