from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.cli.quickstart import write_tokenizer
from tests.dovetail.commands import Result, dovetail
from tests.models import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama directory with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_model(directory, "llama", vocab_size=258, bos_token_id=256, eos_token_id=257)
    write_tokenizer(directory / "tokenizer.json")
    return directory


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
