"""What README.md shows of a running server is what comes out."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.repository import ROOT
from tests.runtime.server.live import Live

BLOCK = re.compile(r"<!-- served: (\w+) -->\n```\w+\n(.*?)```\n```text\n(.*?)```", re.DOTALL)
COMMANDS = {"sh": ["sh", "-e"], "python": [sys.executable, "-P", "-"]}


def test_shown_calls_print_what_is_shown(live: Live) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert [language for language, _, _ in blocks] == ["sh", "python"]
    for language, text, shown in blocks:
        call = text.replace("http://127.0.0.1:8000", live.url)
        done = subprocess.run(
            COMMANDS[language], input=call, capture_output=True, text=True, check=False
        )
        assert done.stdout == shown, done.stderr
