"""Tab in bash, by the script that `--show-completion` prints there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dovetail.commands import with_command

SCRIPT = """
set -e
eval "$(dovetail --show-completion)"
complete -p dovetail
COMP_WORDS=({words}) COMP_CWORD={last}
_dovetail_completion dovetail
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("dovetail ins", ["inspect"]),
        ("dovetail bench p", ["profile", "perplexity"]),
        ("dovetail serve --metrics", ["--metrics-prefix"]),
    ],
)
def test_bash_completes_verbs_and_options(words: str, found: list[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    script = SCRIPT.format(words=words, last=len(words.split()) - 1)
    done = subprocess.run(
        [bash, "-c", script],
        capture_output=True,
        text=True,
        env=with_command(tmp_path),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    declared, *offered = done.stdout.splitlines()
    assert declared == "complete -o default -F _dovetail_completion dovetail"
    assert offered == found
