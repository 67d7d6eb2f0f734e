"""Where faiss is not installed, verbs that need it say in one sentence which extra to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.tiny_world import ENCODER

HIDDEN = "import sys; sys.modules['faiss'] = None; from dovetail.cli import main; main()"


@pytest.mark.parametrize("verb", ["index", "quickstart"])
def test_the_extra_is_named_before_anything_is_made(verb: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a note")
    given = {
        "index": ["index", "build", "a.txt", "-o", "idx", "--embedder", str(ENCODER)],
        "quickstart": ["quickstart", "--directory", "quick"],
    }
    command = [sys.executable, "-P", "-c", HIDDEN, *given[verb]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "dovetail: indexes need faiss; install dovetail with the extra `rag`\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
