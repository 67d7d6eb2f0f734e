"""Models by id: an artifact with several encoders serves each under a name of its own."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import load
from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.metrics import ServerMetrics
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.vectors import _embed
from dovetail.tiny_world import ENCODER
from tests.encoders import save_encoder


def test_encoders_of_one_artifact_are_asked_for_by_name(tmp_path: Path) -> None:
    save_encoder(tmp_path / "small", "bert", vocab_size=3000)
    shutil.copy(ENCODER / "tokenizer.json", tmp_path / "small")
    sources = {"tiny": ENCODER, "small": tmp_path / "small"}
    compile_model(sources, output=tmp_path / "two.dove", effort="none", threads=1)
    app = load(tmp_path / "two.dove", threads=1)
    models = Models([ServedModel("two", app)])
    try:
        assert [model.id for model in models] == ["two", "two/tiny", "two/small"]
        rows = {
            name: asyncio.run(_embed(models.find(name, "embed"), ["a text"], None))[0]
            for name in (None, "two", "two/tiny", "two/small")
        }
        np.testing.assert_array_equal(rows["two/small"], app.embed("a text", model="small"))
        np.testing.assert_array_equal(rows["two/tiny"], rows["two"])
        np.testing.assert_array_equal(rows[None], rows["two"])
        assert models.find("two/small").context == 512
        with pytest.raises(ApiError):
            models.find("two/other")
        with pytest.raises(ApiError, match="does not generate text; no model here does"):
            models.find("two/small", "generate")
        found = ServerMetrics(models, "dovetail").render().decode()
        (line,) = re.findall(r"^dovetail:speculations_total.*accepted.*$", found, re.MULTILINE)
        assert 'model_name="two"' in line, "what an app does is told once"
    finally:
        models.close()
