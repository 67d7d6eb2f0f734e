"""Answers have the form that was asked for, wherever the engine runs and whatever happens to it."""

from __future__ import annotations

import datetime
import json
import math
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule.request import Completion
from dovetail.runtime.text import masks
from dovetail.runtime.text.masks import TokenMask
from dovetail.tiny_world import LLAMA
from tests.schemas import Schema, draw_schemas

PROMPT = "Question: What is the capital of Zorvia?\nAnswer:"
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {"schema": PERSON, "max_tokens": 200}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forms") / "llama.dove"
    compile_model(LLAMA, output=path, effort="none", threads=1, weight_dtype="f32")
    return path


@pytest.fixture(scope="module")
def app(artifact: Path) -> Iterator[App]:
    with load(artifact) as opened:
        yield opened


def check_person(done: Completion) -> None:
    assert done.finish_reason == "stop" and done.text is not None
    jsonschema.validate(json.loads(done.text), PERSON)


# ---- schemas of all kinds ----


def is_time(value: str) -> bool:
    shape = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
    return re.fullmatch(shape, value) is not None


def is_moment(value: str) -> bool:
    date, time = value[:10], value[11:]
    datetime.date.fromisoformat(date)
    return value[10] in "Tt" and is_time(time)


def checker() -> jsonschema.FormatChecker:
    """Return what checks formats; of times, which the library reads otherwise, by RFC 3339."""
    found = jsonschema.FormatChecker()
    found.checks("time", raises=ValueError)(is_time)
    found.checks("date-time", raises=ValueError)(is_moment)
    return found


def count_stops(app: App, schemas: list[Schema]) -> int:
    """Return how many answers end by themselves; all of these have the form they should have."""
    prompts = [f"Question: {json.dumps(schema)[:200]}\nAnswer:" for schema in schemas]
    jobs = [
        app.submit(prompt, schema=schema, max_tokens=400)
        for prompt, schema in zip(prompts, schemas, strict=True)
    ]
    stops = 0
    for schema, job in zip(schemas, jobs, strict=True):
        done = job.result()
        if done.finish_reason == "stop":
            assert done.text is not None
            jsonschema.validate(json.loads(done.text), schema, format_checker=checker())
            stops += 1
    return stops


def test_answers_validate_by_their_schemas(app: App) -> None:
    assert count_stops(app, draw_schemas(40, 40)) >= 38


@pytest.mark.long
def test_answers_validate_by_a_thousand_schemas(app: App) -> None:
    assert sum(count_stops(app, draw_schemas(seed, 100)) for seed in range(10)) >= 950


# ---- wherever the engine runs ----


@pytest.mark.parametrize(
    "options",
    [
        {"apart": True},
        {"device": "torch:cpu"},
        {"device": "torch:cpu", "offload": "full"},
        {"plan": ServicePlan(
            processes=3,
            prefill=PhasePlan(threads=1, cpus=()),
            decode=PhasePlan(threads=1, cpus=()),
            kv_blocks=64,
        )},
        {"deterministic": True, "kv_blocks": 40},
    ],
    ids=["a child", "a device", "both", "three ranks", "small memory"],
)  # fmt: skip
def test_engines_agree(app: App, artifact: Path, options: dict[str, Any]) -> None:
    prompts = [PROMPT, "Melkar", "Question: Who?\nAnswer:"] * 2
    wanted = app.generate(prompts, **ASKED)
    with load(artifact, **options) as other:
        found = other.generate(prompts, **ASKED)
    for one, two in zip(wanted, found, strict=True):
        check_person(one)
        assert (one.text, one.finish_reason) == (two.text, two.finish_reason)


def test_a_form_is_followed_whatever_length_a_tokenizer_was_trained_with(
    app: App, tmp_path: Path
) -> None:
    """Trainers save tokenizers with the length that they cut and filled their texts to."""
    model = shutil.copytree(LLAMA, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9, direction="left")
    tokenizer.save(str(model / "tokenizer.json"))
    path = tmp_path / "llama.dove"
    compile_model(model, output=path, effort="none", threads=1, weight_dtype="f32")
    with load(path) as other:
        (found,) = other.generate(PROMPT, **ASKED)
    check_person(found)
    assert found.text == app.generate(PROMPT, **ASKED)[0].text


def test_samples_differ_and_keep_the_form(app: App) -> None:
    found = app.generate(PROMPT, **ASKED, n=6, temperature=1.5, seed=3, presence_penalty=1.0)
    assert len({done.text for done in found}) > 1
    for done in found:
        check_person(done)


def test_draws_under_a_form_come_as_often_as_their_odds(app: App) -> None:
    """Each is tried without a mask, and drawn again under it where it is refused."""
    (free,) = app.generate("a", max_tokens=1, logprobs=100)
    assert free.logprobs is not None and app.tokenizer is not None
    odds = {app.tokenizer.decode([token]): math.exp(odd) for token, odd in free.logprobs[0].top}
    words = [" language", " was", " birthplace", " The"]
    assert 0.2 < sum(odds[word] for word in words) < 0.6  # some draws are refused, some are not
    asked = {"structured_outputs": {"choice": words}, "temperature": 1.0, "max_tokens": 300}
    drawn: Counter[str] = Counter()
    for seed in range(6):
        done = app.generate("a", **asked, n=250, seed=seed)
        drawn.update(app.tokenizer.decode(one.token_ids[:1]) for one in done)
    count, whole = sum(drawn[word] for word in words), sum(odds[word] for word in words)
    assert count > 1200  # others begin one of the words
    for word in words:
        wanted = odds[word] / whole
        spread = math.sqrt(wanted * (1 - wanted) / count)
        assert drawn[word] / count == pytest.approx(wanted, abs=4 * spread)


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
        ({"grammar": 'start: "<" /[0-9]{1,3}/ ">"'}, "<[0-9]{1,3}>"),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, "<[0-9]>"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_every_kind_of_form_is_kept(app: App, form: dict[str, Any], shape: str) -> None:
    (done,) = app.generate(PROMPT, structured_outputs=form, max_tokens=150)
    assert done.finish_reason == "stop" and done.text and re.fullmatch(shape, done.text)


def test_an_answer_ends_where_its_form_does(app: App) -> None:
    """Whatever else is asked of its length; nothing of the model's own odds is hidden."""
    (done,) = app.generate(
        PROMPT,
        structured_outputs={"choice": ["yes"]},
        min_tokens=30,
        max_tokens=60,
        ignore_eos=True,
        logprobs=2,
    )
    assert (done.text, done.finish_reason) == ("yes", "stop")
    assert done.token_ids[-1] in app.end_tokens and done.logprobs is not None
    assert all(one.logprob <= one.top[0][1] for one in done.logprobs)
    assert any(one.token_id != one.top[0][0] for one in done.logprobs)


def test_an_answer_that_would_be_cut_off_ends_in_time(app: App) -> None:
    """A text without end is closed before the limit, and what must follow is there."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 200}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    for limit in (170, 220):
        (done,) = app.generate("Melkar", schema=schema, max_tokens=limit)
        text = json.loads(done.text or "")
        assert done.finish_reason == "stop" and len(text["a"]) >= 200 and "b" in text
        assert len(done.token_ids) <= limit
    (short,) = app.generate("Melkar", schema=schema, max_tokens=9)
    assert short.finish_reason == "length"  # there was no way


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_limit_changes_no_answer_that_fits_in_it(app: App, temperature: float) -> None:
    wishes = [{"choice": ["yes", "no", "maybe not", "absolutely"]}, {"json": {"type": "integer"}}]
    for form in wishes:
        asked: dict[str, Any] = {"structured_outputs": form, "temperature": temperature, "seed": 1}
        (free,) = app.generate(PROMPT, **asked, max_tokens=100)
        assert free.finish_reason == "stop"
        for limit in range(len(free.token_ids), len(free.token_ids) + 12):
            (done,) = app.generate(PROMPT, **asked, max_tokens=limit)
            assert done.token_ids == free.token_ids, limit


def test_answers_end_at_any_limit_that_an_end_fits_in(app: App) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    for limit in range(6, 20):
        (done,) = app.generate(PROMPT, schema=schema, max_tokens=limit)
        assert done.finish_reason == "stop" and len(done.token_ids) <= limit
        jsonschema.validate(json.loads(done.text or ""), schema)


# ---- what goes wrong ----


def test_a_wrong_form_starts_nothing(app: App) -> None:
    with pytest.raises(RequestError, match="not supported: uniqueItems"):
        app.generate([PROMPT, PROMPT], schema={"type": "array", "uniqueItems": True})
    (done,) = app.generate(PROMPT, **ASKED)
    check_person(done)


def test_who_is_gone_before_a_grammar_is_read_gets_nothing(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compile_one = threading.Event(), masks.Grammars._compile

    def wait(self: masks.Grammars, grammar: str) -> object:
        gate.wait()
        return compile_one(self, grammar)

    monkeypatch.setattr(masks.Grammars, "_compile", wait)
    with load(artifact) as app:
        job = app.submit(PROMPT, **ASKED)
        (free,) = app.generate(PROMPT, max_tokens=3)  # who asks for no form does not wait
        assert len(free.token_ids) == 3
        app.generator.drop([job])
        gate.set()
        assert job.result().finish_reason == "abort"
        assert not app.engine.scheduler.requests


def test_no_step_waits_for_a_grammar(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read before its request began is not read again within a step."""
    read, compile_one, gate = list[str](), masks.Grammars._compile, threading.Event()

    def count(self: masks.Grammars, grammar: str) -> object:
        read.append(grammar)
        return compile_one(self, grammar)

    monkeypatch.setattr(masks.Grammars, "_compile", count)
    with load(artifact) as app:
        app.generator.host.call(gate.wait)  # the engine's thread has something else to do
        words = [f"word {number}" for number in range(masks.KEPT + 8)]
        jobs = [app.submit("A", structured_outputs={"choice": [word]}) for word in words]
        app.engine.grammars._thread(masks.READER).submit(gate.set)  # behind all of them
        assert [job.result().text for job in jobs] == words
    assert max(Counter(read).values()) == 1, "some were read twice"


def test_a_form_that_cannot_be_followed_fails_alone(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that follows grammars hangs in one of them: others go on with a new thread."""
    gate, find, open_mask = threading.Event(), TokenMask.find, masks.Grammars.open
    opened, stuck = list[TokenMask](), Future[None]()

    def mark(self: masks.Grammars, grammar: str, left: int, tries: int | None) -> TokenMask:
        opened.append(open_mask(self, grammar, left, tries))
        return opened[-1]

    def hang(self: TokenMask) -> None:
        if self.left < 190 and self is opened[2]:
            stuck.set_result(None)
            gate.wait()
        find(self)

    class Patient(masks._MaskBatch):
        """Is given up once its thread hangs, never for what a busy machine takes."""

        def __init__(self, found: Sequence[TokenMask], thread: ThreadPoolExecutor) -> None:
            super().__init__(found, thread)
            self.whole = self.done
            self.done = self  # type: ignore[assignment]

        def result(self, _patience: float) -> None:
            wait((self.whole, stuck), return_when=FIRST_COMPLETED)
            if stuck.done() and opened[2].batch is self and not self.whole.done():
                raise TimeoutError
            self.whole.result()

    monkeypatch.setattr(masks, "_MaskBatch", Patient)
    monkeypatch.setattr(masks.Grammars, "open", mark)
    monkeypatch.setattr(TokenMask, "find", hang)
    try:
        with load(artifact) as app:
            jobs = [app.submit(f"{PROMPT} {number}", **ASKED) for number in range(8)]
            failed = 0
            for job in jobs:
                try:
                    check_person(job.result())
                except RequestError as error:
                    assert "too much time" in str(error)
                    failed += 1
            assert failed == 1
            check_person(app.generate(PROMPT, **ASKED)[0])
    finally:
        gate.set()


def test_a_model_without_a_tokenizer_takes_no_form(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        masks.Grammars(None, 97, [5]).read('start: "a"').result()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="not available with this model's tokenizer"):
        masks.Grammars(tmp_path / "tokenizer.json", 97, [5]).read('start: "a"').result()
