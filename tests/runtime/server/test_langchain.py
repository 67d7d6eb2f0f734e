"""LangChain's OpenAI classes with nothing set but the URL."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest

import dovetail
from dovetail.runtime.app import App
from tests.extras import need
from tests.repository import ROOT
from tests.runtime.server.live import Live
from tests.runtime.server.openai_calls import PROMPT, answer, chat_ids

need("langchain_openai")


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def test_chat_invokes_streams_and_batches(live: Live, offline: App) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=live.v1, model="llama")
    wanted = answer(offline, chat_ids(offline), max_tokens=500)
    assert chat.invoke(PROMPT).content == wanted
    assert "".join(chunk.content for chunk in chat.stream(PROMPT)) == wanted
    assert [reply.content for reply in chat.batch([PROMPT, PROMPT])] == [wanted] * 2
    assert asyncio.run(chat.ainvoke(PROMPT)).content == wanted


def test_embeddings(live: Live, artifacts: dict[str, str]) -> None:
    from langchain_openai import OpenAIEmbeddings

    # without the length check, which would fetch OpenAI's vocabulary to cut long texts
    embed = OpenAIEmbeddings(base_url=live.v1, model="encoder", check_embedding_ctx_length=False)
    with dovetail.load(artifacts["encoder"]) as app:
        rows = app.embed(["a", "b c"])
    np.testing.assert_allclose(embed.embed_documents(["a", "b c"]), rows, atol=1e-6)
    np.testing.assert_allclose(embed.embed_query("a"), rows[0], atol=1e-6)


def test_the_example_answers_from_the_nearest_document(live: Live) -> None:
    asked = live.v1, "llama", "encoder", "Who is the founder of Komosburg?"
    command = [sys.executable, "-P", str(ROOT / "examples/langchain_rag.py"), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "The founder of Komosburg is Copa Grorsky.\n", done.stderr
