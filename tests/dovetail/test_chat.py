"""`App.chat` and its twins: equal to the template's prompt continued, with notes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail.errors import RequestError
from dovetail.runtime.app import App
from dovetail.runtime.text.chat import ChatCompletion
from tests.dovetail.commands import compile_with

PROMPT = (
    "Documents:\n- Melkar is the capital of Zorvia. Its people speak Zorvish.\n"
    "Question: What language is spoken in Zorvia?\nAnswer:"
)
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def app(artifact: Path) -> Iterator[App]:
    with dovetail.load(artifact, deterministic=True) as found:
        yield found


def ids_of(app: App, text: str) -> list[int]:
    assert app.tokenizer is not None
    return app.tokenizer.encode(text, special=False)


def plain(found: ChatCompletion) -> tuple[Any, ...]:
    return found.text, found.token_ids, found.finish_reason, found.notes


def test_an_answer_is_the_prompt_of_the_template_continued(app: App) -> None:
    prompt = ids_of(app, f"<|user|>{PROMPT}<|end|><|assistant|>")
    (expected,) = app.generate([prompt], max_tokens=1024)
    found = app.chat(MESSAGES)
    assert found.token_ids == expected.token_ids and found.text == expected.text
    assert found.message.role == "assistant" and found.message.content == expected.text
    assert found.finish_reason == "stop" and found.notes == ()


def test_an_answer_can_be_gone_on_with(app: App) -> None:
    first = app.chat(MESSAGES)
    more = [*MESSAGES, first.message, {"role": "user", "content": PROMPT}]
    turn = f"<|user|>{PROMPT}<|end|><|assistant|>"
    prompt = ids_of(app, f"{turn}{first.text}<|end|>{turn}")
    (expected,) = app.generate([prompt], max_tokens=1024)
    assert app.chat(more).token_ids == expected.token_ids


def test_streams_and_async_twins_say_the_same(app: App) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 30}
    whole = app.chat(MESSAGES, **options)
    deltas = list(app.chat_stream(MESSAGES, **options))

    async def gather() -> tuple[ChatCompletion, str]:
        answer = await app.achat(MESSAGES, **options)
        return answer, "".join([d.content async for d in app.achat_stream(MESSAGES, **options)])

    answer, text = asyncio.run(gather())
    assert plain(answer) == plain(whole) and text == whole.text
    assert "".join(d.content for d in deltas) == whole.text
    assert sum((d.token_ids for d in deltas), ()) == whole.token_ids
    assert deltas[-1].finish_reason == whole.finish_reason


def test_a_stream_that_is_left_ends_its_request(app: App) -> None:
    stream = app.chat_stream(MESSAGES, ignore_eos=True)
    assert next(stream).content
    stream.close()
    assert not app.engine.scheduler.requests


def test_a_long_history_loses_its_oldest_turns(app: App) -> None:
    old = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "Zorvish. " * 20}]
    messages = [*old * 9, *MESSAGES]
    found = app.chat(messages)
    (note,) = found.notes
    dropped = next(k for k in range(1, 10) if f"{k} turns were left out" in note)
    assert plain(app.chat(messages[2 * dropped :])) == (*plain(found)[:3], ())
    assert next(app.chat_stream(messages)).notes == found.notes


def test_what_must_stay_and_does_not_fit_is_refused(app: App) -> None:
    with pytest.raises(RequestError, match="context holds 1024 tokens"):
        app.chat([{"role": "user", "content": PROMPT * 30}])
    with pytest.raises(RequestError, match="context holds 1024 tokens"):
        app.chat([{"role": "system", "content": PROMPT * 30}, *MESSAGES])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop": ["The"]}, "a text or token to stop at"),
        ({"allowed_token_ids": [1]}, "the model ended it at once"),
        ({"allowed_token_ids": [0], "max_tokens": 3}, "all the tokens that it may have (3)"),
    ],
)
def test_an_empty_answer_is_explained(app: App, options: dict[str, Any], said: str) -> None:
    found = app.chat(MESSAGES, **options)
    assert found.message.content == "" and said in found.notes[0]
    assert list(app.chat_stream(MESSAGES, **options))[-1].notes == found.notes


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ([{"role": "user"}, 5], {}),
        (MESSAGES, {"max_tokens": 0}),
        (MESSAGES, {"max_tokens": "many"}),
        (MESSAGES, {"n": 2}),
        (MESSAGES, {"colour": "red"}),
        (MESSAGES, {"priority": 1000}),
    ],
)
def test_wrong_wishes_are_told_of_at_once(app: App, messages: Any, options: Any) -> None:
    for call in (app.chat, app.chat_stream):
        with pytest.raises(RequestError):
            call(messages, **options)


def test_templates_are_given_their_options(model: Path, tmp_path: Path) -> None:
    path = compile_with(model, tmp_path, "{{ messages[0].content }}{{ tools }}{{ mood }}")
    with dovetail.load(path) as app:
        given = {"tools": [{"a": 1}], "mood": "!"}
        found = app.chat(MESSAGES, chat_template_kwargs=given, max_tokens=4)
        (expected,) = app.generate([ids_of(app, PROMPT + "[{'a': 1}]!")], max_tokens=4)
        assert found.token_ids == expected.token_ids


def test_a_model_without_a_template_has_no_chats(model: Path, tmp_path: Path) -> None:
    with dovetail.load(compile_with(model, tmp_path, None)) as app:
        assert app.template is None
        with pytest.raises(RequestError, match="no chat template; use `generate`"):
            app.chat(MESSAGES)
