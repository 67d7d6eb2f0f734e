"""What pages show works: runnable blocks run, and print what is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dovetail.commands import with_command
from tests.repository import ROOT

README = ROOT / "README.md"
PAGES = [
    ((README, ROOT / "docs/getting-started.md"), ["sh", "python", "sh"] * 2),
    pytest.param((ROOT / "docs/usage.md",), ["sh", "python"], marks=pytest.mark.long),
    ((ROOT / "docs/extend/kernel.md",), ["sh"]),
]
"""The pages, those that are read one after the other in one folder, and the languages of their
runnable blocks. The verbs that only one of them shows have tests of their own.
"""
BLOCK = re.compile(
    r"<!-- (runnable|file: (\S+)) -->\n```(\w+)\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the examples that the pages name."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize(("pages", "languages"), PAGES)
def test_blocks_run_as_they_stand_and_end_with_what_is_shown(
    pages: tuple[Path, ...], languages: list[str], folder: Path
) -> None:
    environment = with_command(folder)
    ran = []
    written = "".join(page.read_text() for page in pages)
    for _, file, language, text, shown in BLOCK.findall(written):
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
            env=environment,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        assert done.stdout.rstrip().endswith(shown.rstrip()), f"{text}\n{done.stdout}"
        ran.append(language)
    assert ran == languages


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 200


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", README.read_text()))
    assert {"quickstart", "test", "test-long"} <= named <= targets


def test_ci_runs_the_command_the_readme_names() -> None:
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
