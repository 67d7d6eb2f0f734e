"""What README.md and docs/server.md show of a running server is what comes out."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.repository import ROOT
from tests.runtime.server.live import Live

BLOCK = re.compile(r"<!-- served: (\w+) -->\n```\w+\n(.*?)```\n```text\n(.*?)```", re.DOTALL)
COMMANDS = {"sh": ["sh", "-e"], "python": [sys.executable, "-P", "-"]}


@pytest.mark.parametrize(("page", "shown_in"), [("README.md", "sh"), ("docs/server.md", "python")])
def test_shown_calls_print_what_is_shown(live: Live, page: str, shown_in: str) -> None:
    ((language, text, shown),) = BLOCK.findall((ROOT / page).read_text())
    assert language == shown_in
    call = text.replace("http://127.0.0.1:8000", live.url)
    done = subprocess.run(
        COMMANDS[language], input=call, capture_output=True, text=True, check=False
    )
    assert done.stdout == shown, done.stderr
