"""Texts through a loaded artifact: the bundled encoder against transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.embed.texts import TextEncoder
from dovetail.runtime.verify import verify_artifact
from dovetail.tiny_world import ENCODER, LLAMA
from tests.encoders import cosines, last_rows, save_decoder, save_encoder
from tests.runtime.embed.integrity import held

TEXTS = ("Where does Ada live?", "", "The harbour of Elm was built by the mayor.", "x " * 900)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("texts") / "tiny.dove"
    compile_model(ENCODER, output=output, effort="none", threads=1, weight_dtype="f32")
    return output


@pytest.fixture(scope="module")
def app(path: Path) -> Iterator[App]:
    with load(path) as found:
        yield found


def test_texts_equal_transformers(app: App) -> None:
    pytest.importorskip("torch")
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer.from_file(str(ENCODER / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    ids = [np.array(e.ids) for e in tokenizer.encode_batch(list(TEXTS))]
    model = transformers.BertModel.from_pretrained(ENCODER, add_pooling_layer=False).eval()
    wanted = np.array([rows.mean(0) for rows in last_rows(model, ids)])
    assert cosines(app.embed(TEXTS), wanted).min() > 0.999999
    np.testing.assert_array_equal(app.embed(TEXTS[0]), app.embed([ids[0].tolist()]))
    np.testing.assert_array_equal(app.embed(ids[0].tolist()), app.embed([ids[0]]))
    np.testing.assert_array_equal(asyncio.run(app.aembed(TEXTS[2])), app.embed([TEXTS[2]]))
    assert app.embed([]).shape == (0, 128)


def test_a_prompt_goes_before_each_text(app: App) -> None:
    with_prompt = app.embed(["of Elm", "of Oak"], prompt="The mayor ")
    plain = app.embed(["The mayor of Elm", "The mayor of Oak"])
    np.testing.assert_allclose(with_prompt, plain, atol=1e-6)


def test_vectors_are_cut(path: Path, app: App) -> None:
    whole, short = app.embed(TEXTS), app.embed(TEXTS, dimensions=24)
    lengths = np.linalg.norm(whole[:, :24], axis=1, keepdims=True)
    np.testing.assert_allclose(short, whole[:, :24] / lengths, atol=1e-6)
    np.testing.assert_array_equal(app.embed(TEXTS, dimensions=128), whole)
    np.testing.assert_array_equal(asyncio.run(app.aembed(TEXTS, dimensions=24)), short)
    (encoder,) = app.embeddings.encoders.values()
    plain = TextEncoder("plain", replace(encoder.spec, unit=False), None, encoder.service)
    np.testing.assert_array_equal(plain.cutter(24)(whole), whole[:, :24])
    for dimensions in (0, 129):
        with pytest.raises(RequestError, match="must be 1 to 128"):
            app.embed(TEXTS, dimensions=dimensions)


@pytest.mark.parametrize("in_tokenizer", [True, False])
def test_a_decoder_embeds_beside_one_that_generates(tmp_path: Path, in_tokenizer: bool) -> None:
    """As Qwen3-Embedding: by prompts, and the row of the token that a text ends with."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    model = save_decoder(tmp_path / "m", "qwen3", vocab_size=768)
    tokenizer = tokenizers.Tokenizer.from_file(str(LLAMA / "tokenizer.json"))
    end = "<|end|>"
    tokenizer.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 1)])
    tokenizer.save(str(tmp_path / "m/tokenizer.json"))
    prompts = {"prompts": {"query": "Query: ", "document": ""}}
    (tmp_path / "m/config_sentence_transformers.json").write_text(json.dumps(prompts))
    if not in_tokenizer:  # as models of Llama and Qwen2 have it
        shutil.copy(LLAMA / "tokenizer.json", tmp_path / "m")
        settings = {"add_eos_token": True, "eos_token": {"content": end}}
        (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(settings))
    models = {"llm": LLAMA, "embedder": tmp_path / "m"}
    options = {"effort": "none", "threads": 1, "weight_dtype": "f32"}
    compile_model(models, output=tmp_path / "two.dove", **options)
    tokenizer.enable_truncation(512)
    ids = [np.array(tokenizer.encode(f"Query: {text}").ids) for text in TEXTS]
    assert [each[-1] for each in ids] == [1] * len(TEXTS) and len(ids[3]) == 512
    wanted = np.array([rows[-1] for rows in last_rows(model, ids)])
    with load(tmp_path / "two.dove") as app:
        found = app.embed(TEXTS, prompt_name="query")
        assert len(app.generate(["Who?"], max_tokens=1)) == 1
    assert cosines(found, wanted).min() > 0.99999


def test_documents_are_ranked_as_by_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    where = tmp_path / "ranker"
    options = {"vocab_size": 3000, "num_labels": 1}
    model = save_encoder(where, "bert", head="ForSequenceClassification", **options)
    shutil.copy(ENCODER / "tokenizer.json", where)
    compile_model(
        where, output=tmp_path / "ranker.dove", effort="none", threads=1, weight_dtype="f32"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(where / "tokenizer.json"))
    documents = ["The mayor lives in Elm.", "x", "Ada built the harbour. " * 90]
    wanted = []
    options = {"truncation": True, "max_length": 512, "return_token_type_ids": True}
    for text in documents:
        given = tokenizer("Who lives in Elm?", text, **options)
        ids, kinds = (torch.tensor([given[k]]) for k in ("input_ids", "token_type_ids"))
        with torch.inference_mode():
            wanted.append(float(model(ids, token_type_ids=kinds).logits.sigmoid()))
    with load(tmp_path / "ranker.dove") as ranker:
        found = ranker.rerank("Who lives in Elm?", documents)
        assert ranker.rerank("Who lives in Elm?", documents, top_n=1) == found[:1]
        assert ranker.rerank("Who lives in Elm?", []) == []
        assert ranker.rerank("Who lives in Elm?", dict.fromkeys(documents).keys()) == found
        for wrong in (None, "a text", {"a": "text"}, [5]):
            with pytest.raises(RequestError, match=r"a list of texts|give texts|be a text"):
                ranker.rerank("Who lives in Elm?", wrong)
        with pytest.raises(RequestError, match="no encoder"):
            ranker.embed("x")
    assert [one.index for one in found] == np.argsort(wanted)[::-1].tolist()
    for one in found:
        assert one.document == documents[one.index]
        assert one.score == pytest.approx(wanted[one.index], abs=1e-5)


def test_strange_texts_end_in_a_vector_or_the_right_error(app: App) -> None:
    """Long, empty and broken texts, alone and among others, which get their own vectors."""
    plain = app.embed(["Ada", "Elm"])
    long = "Ada lives in Elm. " * 60_000  # 10^6 characters
    rows = app.embed(["Ada", long, "", "Elm", "x" * 10**6])
    np.testing.assert_allclose(rows[[0, 3]], plain, atol=1e-6)
    np.testing.assert_allclose(rows[1], app.embed([long[:9000]])[0], atol=1e-6)  # both are cut
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    with pytest.raises(RequestError, match="text 1 is not valid Unicode"):
        app.embed(["good", "\udfff bad", "good"])
    with pytest.raises(RequestError, match="text 2"):
        app.embed([[5], [6], [10**6]])
    np.testing.assert_allclose(app.embed(["Ada", "Elm"]), plain, atol=1e-6)


def test_calls_of_many_threads_share_passes(app: App) -> None:
    texts = [f"The mayor of Elm has {n} harbours." for n in range(64)]
    wanted = app.embed(texts)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(app.embed, texts))
    np.testing.assert_allclose(np.concatenate(rows), wanted, atol=1e-6)


def test_a_cancelled_task_leaves_the_queues(app: App) -> None:
    service = app.embeddings.choose(labels=False).service

    async def work() -> None:
        many = asyncio.create_task(app.aembed(["Where does Ada live?"] * 5_000))
        while not held(service)["cpu"]:
            await asyncio.sleep(0)
        many.cancel()
        with pytest.raises(asyncio.CancelledError):
            await many
        early = asyncio.create_task(app.aembed(["Where does Ada live?"] * 5_000))
        await asyncio.sleep(0)  # it reads its texts now
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        assert (await app.aembed("Elm")).shape == (1, 128)

    asyncio.run(work())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled encoder and a small one in one artifact."""
    folder = tmp_path_factory.mktemp("two")
    save_encoder(folder / "small", "bert", vocab_size=3000)
    shutil.copy(ENCODER / "tokenizer.json", folder / "small")
    models = {"tiny": ENCODER, "small": folder / "small"}
    compile_model(models, output=folder / "two.dove", effort="none", threads=1, weight_dtype="f32")
    return folder / "two.dove"


@pytest.mark.parametrize(
    "settings",
    [
        None,
        pytest.param(EmbeddingSettings(slo=1.0, classes=()), marks=pytest.mark.long),
    ],
)
def test_an_encoder_is_chosen_by_name_and_all_share_the_cpu(
    app: App, two: Path, settings: EmbeddingSettings | None
) -> None:
    with load(two, threads=1, embedding=settings) as both:
        rows = both.embed(TEXTS, wait=True)
        np.testing.assert_allclose(rows, app.embed(TEXTS), atol=1e-6)
        np.testing.assert_array_equal(both.embed(TEXTS, model="tiny", wait=True), rows)
        small = both.embed(TEXTS, model="small", wait=True)
        assert small.shape == (4, 64)
        one = asyncio.run(both.aembed(TEXTS[0], model="small", wait=True))
        np.testing.assert_array_equal(one, small[:1])
        with pytest.raises(RequestError, match="no encoder 'other'; it has tiny, small"):
            both.embed("x", model="other")
        with pytest.raises(RequestError, match="no cross-encoder"):
            both.rerank("x", ["y"], model="tiny")
        chosen = [both.embeddings.choose(name, labels=False) for name in ("tiny", "small")]
        assert chosen[0].service is chosen[1].service
        assert {each.model for each in chosen[0].service.manager.classes} == {"tiny", "small"}


@pytest.mark.long
@pytest.mark.timeout(1800)  # 15 seconds of CPU time, which a busy machine may take long to give
def test_a_hundred_thousand_texts_in_one_call(app: App) -> None:
    texts = [f"Ada has {n % 1000} boats." for n in range(100_000)]
    rows = app.embed(texts)
    few = app.embed(texts[:1000])
    assert rows.shape == (100_000, 128)
    np.testing.assert_allclose(rows.reshape(100, 1000, 128), np.tile(few, (100, 1, 1)), atol=1e-5)


def test_what_cannot_be_done_is_said(app: App) -> None:
    for call, words in (
        (lambda: app.embed("\ud800"), "half a surrogate"),
        (lambda: app.embed(["x", None]), "text 1"),
        (lambda: app.embed(5), "give texts"),
        (lambda: app.embed("x", prompt_name="query"), "no prompt 'query'"),
        (lambda: app.rerank("x", ["y"]), "no cross-encoder"),
        (lambda: app.generate("x"), "no model that generates"),
        (lambda: app.embed("x", dimensions="9"), "dimensions must be a whole number or None"),
        (lambda: app.embed("x", prompt=5), "prompt must be a text or None, not 5"),
        (lambda: asyncio.run(app.aembed("x", model=5)), "model must be a text or None, not 5"),
        (lambda: app.rerank("x", ["y"], top_n="3"), "top_n must be a whole number or None"),
        (lambda: app.rerank("x", ["y"], top=3), "rerank has no option 'top'"),
    ):
        with pytest.raises(RequestError, match=words):
            call()


def test_an_encoders_artifact_verifies_and_a_damaged_one_does_not(path: Path) -> None:
    assert verify_artifact(path).ok
    assert verify_artifact(path).models == ("embedder",)
    weights = path / "models/embedder/weights/weights.bin"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:5000] + b"!" + whole[5001:])
    try:
        assert "corrupted" in verify_artifact(path).faults[0]
    finally:
        weights.write_bytes(whole)


def test_a_text_that_is_too_long_is_cut_between_words_into_parts_that_fit(app: App) -> None:
    encoder = app.embeddings.choose(labels=False)
    words = [f"{word}{number % 10}" for number in range(400) for word in ("red", "blue")]
    for text in (" ".join(words), "word" * 900, "short", ""):
        parts = encoder.divide(text, "passage: ")
        assert "".join(parts).replace(" ", "") == text.replace(" ", "")
        assert all(not encoder._tokenizer.encode("passage: " + p).overflowing for p in parts)
    assert len(encoder.divide(" ".join(words))) > 1 and encoder.divide("short") == ["short"]
    assert all(part in " ".join(words) for part in encoder.divide(" ".join(words)))
    assert set(" ".join(encoder.divide(" ".join(words))).split()) == set(words)
