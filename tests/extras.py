"""Skips modules whose packages are not installed, without importing these.

`pytest.importorskip` would import them while tests are collected, in every process.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(*packages: str) -> None:
    """Skip the module that calls this unless all packages are installed."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
