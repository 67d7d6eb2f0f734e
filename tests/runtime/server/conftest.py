from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import dovetail
from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import App
from dovetail.tiny_world import ENCODER, LLAMA
from tests.runtime.server.live import Live, serving


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of the bundled models, by the ids they are served under."""
    folder = tmp_path_factory.mktemp("served")
    found = {"llama": folder / "llama.dove", "encoder": folder / "encoder.dove"}
    for (_, output), model in zip(found.items(), (LLAMA, ENCODER), strict=True):
        # products of bfloat16 round by the size of a batch, and answers are compared
        compile_model(model, output=output, effort="none", threads=1, weight_dtype="f32")
    return found


@pytest.fixture(scope="session")
def live(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The server that most tests share."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with serving(*artifacts.values(), "--deterministic", log=log) as server:
        yield server


@pytest.fixture(scope="session")
def client(live: Live) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=live.v1, api_key="unused", max_retries=0, timeout=200) as found:
        yield found


@pytest.fixture(scope="session")
def offline(artifacts: dict[str, Path]) -> Iterator[App]:
    """The same Llama in this process: what the server's answers must equal."""
    with dovetail.load(artifacts["llama"], deterministic=True) as app:
        yield app
