from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.tiny_world import LLAMA
from tests.dovetail.commands import Result, dovetail


@pytest.fixture(scope="session")
def model() -> Path:
    """The bundled Llama."""
    return LLAMA


@pytest.fixture(scope="session")
def compiled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The artifact of `model`, and what `dovetail compile --json` said about it."""
    output = tmp_path_factory.mktemp("artifact") / "app.dove"
    result = dovetail("compile", model, "-o", output, "--effort", "none", "--json")
    assert result.code == 0, result.err
    return output, result


@pytest.fixture(scope="session")
def artifact(compiled: tuple[Path, Result]) -> Path:
    """The artifact of `model`; tests must not change it."""
    return compiled[0]
