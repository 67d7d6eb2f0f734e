"""A model that generates and encoders in one artifact: each does what it does alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import SpecError, WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START
from dovetail.runtime.app import load
from dovetail.runtime.verify import verify_artifact
from dovetail.tiny_world import ENCODER
from tests.encoders import save_encoder
from tests.models import save_model

PROMPT, TEXTS = [3, 1, 4, 1, 5], ("Where does Ada live?", "The harbour of Elm.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("several")
    save_model(found / "llama", "llama")
    options = {"vocab_size": 3000, "num_labels": 1}
    save_encoder(found / "ranker", "bert", head="ForSequenceClassification", **options)
    shutil.copy(ENCODER / "tokenizer.json", found / "ranker")
    return found


def compiled(folder: Path, name: str, model: object, **options: object) -> Path:
    compile_model(model, output=folder / name, effort="none", threads=1, **options)
    return folder / name


def test_an_artifact_generates_embeds_and_ranks(folder: Path) -> None:
    models = {"ranker": folder / "ranker", "llama": folder / "llama", "small": ENCODER}
    several = compiled(folder, "several.dove", models)
    assert verify_artifact(several).models == ("llama", "ranker", "small")
    with load(several, check_weights=True) as app:
        tokens = app.generate([PROMPT], max_tokens=6)[0].token_ids
        rows, ranked = app.embed(TEXTS), app.rerank(TEXTS[0], TEXTS)
    with load(compiled(folder, "llama.dove", folder / "llama")) as app:
        assert app.generate([PROMPT], max_tokens=6)[0].token_ids == tokens
    with load(compiled(folder, "small.dove", ENCODER)) as app:
        np.testing.assert_array_equal(app.embed(TEXTS), rows)
    with load(compiled(folder, "ranker.dove", folder / "ranker")) as app:
        assert app.rerank(TEXTS[0], TEXTS) == ranked


def test_encoders_alone_share_an_artifact(folder: Path) -> None:
    path = compiled(folder, "two.dove", folder / "ranker", beside={"small": ENCODER})
    assert verify_artifact(path).models == ("embedder", "small")
    with load(path) as app:
        assert app.embed(TEXTS).shape == (2, 128)
        assert len(app.rerank(TEXTS[0], TEXTS)) == 2


def test_a_node_embeds_with_the_encoder_that_it_names(folder: Path) -> None:
    save_encoder(folder / "other", "bert", vocab_size=3000)
    shutil.copy(ENCODER / "tokenizer.json", folder / "other")
    beside = {"other": folder / "other", "ranker": folder / "ranker"}
    path = compiled(folder, "three.dove", ENCODER, beside=beside)

    def embedding(model: str | None) -> RAGraph:
        g = RAGraph("embed")
        g.add_embedding("embed", text="input", output="vector", model=model)
        g.add_edge(START, "embed")
        g.add_edge("embed", END)
        return g

    with load(path) as app:
        for model, dim in {None: 128, "embedder": 128, "other": 64}.items():
            found = app.run(embedding(model), {"input": TEXTS[0]}).outputs["vector"]
            assert found.shape == (dim,)
            np.testing.assert_array_equal(found, app.embed(TEXTS[0], model=model)[0])
        with pytest.raises(WorkflowError, match=r"no model 'ranker' for embedding; .* 'other'"):
            app.run(embedding("ranker"), {"input": TEXTS[0]})


def test_a_report_tells_of_each(folder: Path) -> None:
    report = compile_model(
        {"llm": folder / "llama", "small": ENCODER}, output=folder / "r.dove", effort="none"
    )
    (small,) = report.encoders
    assert (report.family, small.name, small.family, small.max_tokens) == (
        "llama",
        "small",
        "bert",
        256,
    )
    assert small.weight_bytes > 0


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"second": "llama"}, "holds no text encoder"),
        ({"nothing": "nowhere"}, "does not exist"),
        ({"llm": "ranker"}, "two models have the name llm"),
        ({"../x": "ranker"}, "cannot be called"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folder: Path, tmp_path: Path, others: dict[str, str], words: str
) -> None:
    beside = {name: folder / path for name, path in others.items()}
    with pytest.raises(SpecError, match=words):
        compile_model(folder / "llama", output=tmp_path / "x.dove", effort="none", beside=beside)
    with pytest.raises(SpecError, match="no model to compile"):
        compile_model({}, output=tmp_path / "x.dove", effort="none")
    assert not list(tmp_path.iterdir())
