"""Agents and clients of others against a live server, with nothing set but its address.

Those that are not installed are skipped (extra `clients`): some ask for older versions than ours.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.runtime.server.live import Live
from tests.runtime.server.test_tools import RIVERS, SUM, TOOLS, find_passages, name_of

pytestmark = pytest.mark.long

SUM_ANSWER = "The sum of 1203 and 2210 is 3413."


class Person(BaseModel):
    """A form of an answer."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def look_up(query: str) -> str:
    """Find passages about somebody or something."""
    return find_passages(query)


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def test_an_agent_of_langgraph_uses_two_tools(live: Live) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    openai = pytest.importorskip("langchain_openai")
    model = openai.ChatOpenAI(base_url=live.v1, model="llama", temperature=0)
    agent = prebuilt.create_react_agent(model, [look_up, add])
    for question, end in ((SUM, SUM_ANSWER), (RIVERS, "in kilometers is")):
        talk = agent.invoke({"messages": [("user", question)]})["messages"]
        called = {call["name"] for one in talk for call in getattr(one, "tool_calls", ())}
        assert called == ({"add"} if question == SUM else {"look_up", "add"})
        assert end in talk[-1].content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_answers_in_a_form(live: Live, method: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    model = openai.ChatOpenAI(base_url=live.v1, model="llama", max_tokens=200)
    found = model.with_structured_output(Person, method=method).invoke("Who is Melkar?")
    assert isinstance(found, Person)


def test_litellm_calls_tools(live: Live) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {"model": "openai/llama", "api_base": live.v1, "temperature": 0}
    talk: list[Any] = [{"role": "user", "content": SUM}]
    named = litellm.completion(**asked, messages=talk, tools=TOOLS, tool_choice=name_of(TOOLS[1]))
    (call,) = named.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"a", "b"}
    asked["tools"] = TOOLS
    message = litellm.completion(**asked, messages=talk).choices[0].message
    (call,) = message.tool_calls
    said = add(**json.loads(call.function.arguments))
    talk += [message, {"role": "tool", "tool_call_id": call.id, "content": said}]
    parts = litellm.completion(**asked, messages=talk, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == SUM_ANSWER


def test_litellm_answers_in_a_form(live: Live) -> None:
    litellm = pytest.importorskip("litellm")
    reply = litellm.completion(
        model="openai/llama",
        api_base=live.v1,
        messages=[{"role": "user", "content": "Who is Melkar?"}],
        response_format=Person,
        max_tokens=200,
    )
    assert 0 <= Person.model_validate_json(reply.choices[0].message.content).age <= 150


def test_an_agent_of_llama_index_uses_two_tools(live: Live) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    model = like.OpenAILike(
        api_base=live.v1,
        api_key="unused",
        model="llama",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0.0,
    )
    agent = workflow.FunctionAgent(tools=[look_up, add], llm=model)

    async def ask() -> list[Any]:
        return [await agent.run(question) for question in (SUM, RIVERS)]

    added, looked_up = asyncio.run(ask())
    for reply, tools, end in (
        (added, {"add"}, SUM_ANSWER),
        (looked_up, {"look_up", "add"}, "in kilometers is"),
    ):
        assert {call.tool_name for call in reply.tool_calls} == tools
        assert end in str(reply)


def test_an_agent_of_pydantic_ai_uses_a_tool(live: Live) -> None:
    agents = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=live.v1, api_key="unused")
    model = models.OpenAIChatModel("llama", provider=provider)
    agent = agents.Agent(model, tools=[add], model_settings={"temperature": 0.0})
    assert agent.run_sync(SUM).output == SUM_ANSWER
