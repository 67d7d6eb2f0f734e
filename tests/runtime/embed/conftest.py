"""Encoders of `toy_encoders.py` in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.runtime.embed.encoder import EncoderSource


@pytest.fixture
def toy_source(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EncoderSource]:
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))

    def make(function: str, **options: object) -> EncoderSource:
        return EncoderSource(module="toy_encoders", function=function, options=options)

    return make
