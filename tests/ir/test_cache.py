"""The cache's folder: where it is, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 54_321
"""A user that no system lists."""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path) -> None:
    code = "import os; from dovetail.ir.cache import cache_directory; "
    code += f"os.setuid({NOBODY}); print(cache_directory())"
    kept = {n: v for n, v in os.environ.items() if n not in ("HOME", "XDG_CACHE_HOME")}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        environment = {n: v for n, v in kept.items() if n != "DOVETAIL_CACHE"} | more
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    assert "SpecError: this user has no home; set DOVETAIL_CACHE to a folder" in run().stderr
    assert run(DOVETAIL_CACHE=str(tmp_path)).stdout.strip() == str(tmp_path)
