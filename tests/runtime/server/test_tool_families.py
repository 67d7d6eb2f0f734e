"""Calls of newer families over HTTP: the bundled model, with the marks of their templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.tiny_world import LLAMA
from tests.runtime.server.live import serving
from tests.runtime.server.test_tools import LOOK_UP, SUM, gather, make_tool, read, strict

TEMPLATE = (
    "{%% for t in tools or [] %%}{{ t | tojson }}{%% endfor %%}{# %s #}{%% for m in messages %%}"
    "<|user|>{{ m.content or '' }}{%% for c in m.tool_calls or [] %%}{{ c.function.arguments.a }}"
    "{%% endfor %%}{%% endfor %%}<|assistant|>"
)
FAMILIES = {
    "qwen": "<tool_call>\n<function=",
    "glm": "<tool_call><arg_key> </think>",
    "lfm": "<|tool_call_start|>",
    "gemma": "<|tool_call> <channel|>",
    "deepseek": "<｜tool▁call▁begin｜> ```json",
}
"""By name: the marks of a template."""
ADD = strict(
    make_tool(
        "add",
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "integer"},
                "unit": {"enum": ["km", 'a "mile"']},
                "exact": {"type": "boolean"},
            },
            "required": ["a", "unit", "exact"],
            "additionalProperties": False,
        },
    )
)
TOOLS = [LOOK_UP, ADD]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("families")
    served = [make_family(folder, name) for name in FAMILIES]
    with (
        serving(*served, log=folder / "serve.log") as live,
        openai.OpenAI(base_url=live.v1, api_key="unused", max_retries=0, timeout=200) as found,
    ):
        yield found


def make_family(folder: Path, name: str) -> Path:
    """Compile the bundled model with the template of a family; return the artifact."""
    source = Path(shutil.copytree(LLAMA, folder / name))
    (source / "chat_template.jinja").write_text(TEMPLATE % FAMILIES[name])
    if name == "gemma":  # whose quotes are tokens of their own
        for file in (source / "tokenizer.json", source / "tokenizer_config.json"):
            text = file.read_text()
            file.write_text(text.replace("<|pad|>", '<|\\"|>'))
    compile_model(source, output=folder / f"{name}.dove", effort="none", threads=1)
    return folder / f"{name}.dove"


def ask(client: openai.OpenAI, name: str, messages: Any = None, **fields: Any) -> Any:
    talk = messages or [{"role": "user", "content": SUM}]
    asked = {"messages": talk, "tools": TOOLS, "temperature": 0, "max_tokens": 300, "seed": 1}
    return client.chat.completions.create(model=name, **{**asked, **fields})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("choice", ["required", "add"])
def test_calls_that_must_be_hold_their_schema_at_once_and_in_streams(
    client: openai.OpenAI, name: str, choice: str
) -> None:
    function = {"type": "function", "function": {"name": choice}}
    wanted: Any = choice if choice == "required" else function
    message = ask(client, name, tool_choice=wanted).choices[0].message
    called = read(message.tool_calls)
    assert called and not message.content, message
    for tool, arguments in called:
        assert choice in ("required", tool)
        jsonschema.validate(arguments, SCHEMAS[tool])
    content, streamed, _, deltas = gather(ask(client, name, tool_choice=wanted, stream=True))
    assert [(tool, json.loads(text)) for _, tool, text in streamed] == called and not content
    assert sum(bool(delta.tool_calls) for delta in deltas) > len(called)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_earlier_answers_are_taken(client: openai.OpenAI, name: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    alone, told = (ask(client, name, asked, tool_choice="none") for asked in (talk[:1], talk))
    assert told.usage.prompt_tokens > alone.usage.prompt_tokens


@pytest.mark.parametrize("query", [{"type": "string"}, {"type": "string", "pattern": "^[^x]*$"}])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_that_no_quotes_end_comes_to_its_end_before_the_limit(
    client: openai.OpenAI, name: str, query: dict[str, str]
) -> None:
    schema = {"type": "object", "properties": {"query": query}, "required": ["query"]}
    named: Any = {"type": "function", "function": {"name": "look_up"}}
    tools = [make_tool("look_up", schema)]
    wish = {"tools": tools, "tool_choice": named, "temperature": 2, "n": 4}
    # the small tokenizer cuts what DeepSeek's form needs for an empty text into 135 tokens
    for choice in ask(client, name, **wish, max_tokens=220).choices:
        ((_, arguments),) = read(choice.message.tool_calls)
        jsonschema.validate(arguments, schema)
