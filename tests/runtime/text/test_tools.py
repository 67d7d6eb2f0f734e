"""Tools: what is offered, how templates tell families apart, and what a model is shown."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.ir.errors import RequestError
from dovetail.runtime.text import call_formats
from dovetail.runtime.text.answers import Answer
from dovetail.runtime.text.call_formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PLAIN,
)
from dovetail.runtime.text.chat_template import ChatTemplate, read_template
from dovetail.runtime.text.tools import (
    MAX_TOOLS,
    THOUGHTS,
    ChatStyle,
    read_offer,
)
from dovetail.tiny_world import LLAMA as BUNDLED

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
CIRCLE = {"properties": {"b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/c"}}}
CIRCLE["$defs"]["c"] = {"anyOf": [{"$ref": "#/$defs/b"}] * 300, "oneOf": [{"const": 1}] * 300}
LONG_REFS = {"allOf": [{"allOf": [{"$ref": "#" + "/x" * 255}] * 480}]}
ASTRAY = {"properties": {"b": {"$ref": "#/x"}}, "x": {"anyOf": 5}}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"properties": {"b": DEEP}}
NAMED = {"type": "function", "function": {"name": "add"}}


def test_what_is_offered_is_what_may_be_called() -> None:
    assert read_offer(None) is None and read_offer([]) is None and read_offer([ADD], "none") is None
    offer = read_offer([ADD])
    assert offer is not None and not offer.forced and offer.parallel
    (tool,) = offer.tools
    assert (tool.name, tool.strict) == ("add", False) and "integer" in tool.parameters
    forced = read_offer([ADD], "required", parallel=False)
    assert forced is not None and forced.forced and not forced.named and not forced.parallel
    named = read_offer([ADD], NAMED)
    assert named is not None and named.forced and named.allowed == ("add",)


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([{"type": "web_search"}], None, r"tools\[0\] must be"),
        ([{"type": "function", "function": "add"}], None, r"tools\[0\] must be"),
        ([ADD, {"function": {"name": "a b"}}], None, r"tools\[1\].function.name"),
        ([{"function": {"name": "a" * 65}}], None, "64"),
        *(
            ([{"function": {"name": "a", "parameters": wrong}}], None, f"parameters{said}")
            for wrong, said in (
                (5, " must be a JSON Schema"),
                ([], " must be a JSON Schema"),
                ("{}", " must be a JSON Schema"),
                ({"type": "string"}, ' must have "type": "object"'),
                ({"type": 5}, ".type must be a text or a list"),
                ({"type": [["object"]]}, ".type must hold texts"),
                ({"properties": []}, ".properties must be an object"),
                ({"properties": {"b": 5}}, ".properties.b must be a JSON Schema"),
                ({"properties": {"b": {"anyOf": {}}}}, ".properties.b.anyOf must be a list"),
                ({"$defs": {"b": {"items": [1]}}}, r".\$defs.b.items\[0\] must be a JSON Schema"),
                ({"required": "b"}, ".required must be a list"),
                (
                    {"properties": {"b": {"maxLength": "5"}}},
                    ".properties.b.maxLength must be a whole number",
                ),
                ({"properties": {"b": {"pattern": 5}}}, ".properties.b.pattern must be a text"),
                ({**CIRCLE, "not": {"$ref": "#/" * 257}}, r".not.\$ref may have 512"),
                (CIRCLE, " refers to too many schemas"),
                (LONG_REFS, " refers to too many schemas"),
                (ASTRAY, r" by \$ref.anyOf must be a list"),
                (DEEP, ".* is nested too deeply"),
            )
        ),
        ([{"function": {"name": "a", "strict": "yes"}}], None, "strict must be true or false"),
        ([{"function": {"name": "a", "description": 5}}], None, "description must be a text"),
        ([{"function": {"name": 5}}], None, r"tools\[0\].function.name"),
        ([{"type": 5, "function": {"name": "a"}}], None, r"tools\[0\] must be"),
        ([ADD, ADD], None, "two tools have the name 'add'"),
        ([ADD] * (MAX_TOOLS + 1), None, str(MAX_TOOLS)),
        ([ADD], "any", "tool_choice must be"),
        ([ADD], {"type": "function"}, "tool_choice must be"),
        ([ADD], {"type": "function", "function": {"name": None}}, "tool_choice must be"),
        ([ADD], {"function": {"name": "sub"}}, "none of the tools"),
        ([ADD], {"allowed_tools": {"mode": "function", "tools": [ADD]}}, "tool_choice must be"),
        ([ADD], {"allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice must be"),
        ([ADD], {"allowed_tools": 5}, "tool_choice must be"),
        ([], "required", "tool_choice needs tools"),
    ],
)
def test_wrong_tools_are_refused(tools: list[Any], choice: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_offer(tools, choice)


QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools <tools>' }}{%- for tool in tools %}
{{- tool | tojson }}{%- endfor %}{{- '{"name": ...} in <tool_call></tool_call>' }}{%- endif %}
{%- for m in messages %}{{- m.content.split('</think>')[-1] }}{%- endfor %}"""
STYLES = {
    "qwen": (QWEN, HERMES, THOUGHTS[0], True),
    "llama 3.1": (
        "{%- if tools is not none %}{{- 'Environment: ipython' }}{%- endif %}<|python_tag|>",
        LLAMA,
        None,
        True,
    ),
    "mistral v3": ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL, None, True),
    "magistral": (
        "{% if tools %}{% endif %}[TOOL_CALLS]x[ARGS][THINK][/THINK]",
        MISTRAL_NAMED,
        THOUGHTS[1],
        True,
    ),
    "no tools": ("{{ messages[0].content }}<think></think>", PLAIN, THOUGHTS[0], False),
    "unknown": ("{{ tools | tojson }}", PLAIN, None, True),
}


@pytest.mark.parametrize("name", STYLES)
def test_families_are_told_by_their_templates(name: str) -> None:
    template, calls, thinking, knows = STYLES[name]
    style = ChatStyle.of(template)
    assert (style.thinking, style.knows_tools) == (thinking, knows)
    assert style.calls == calls
    begins = style.begins_thinking("a<|assistant|><think>\n")
    assert begins == (thinking == THOUGHTS[0])


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 more than 0?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]


def test_a_template_that_knows_tools_is_given_them() -> None:
    style, offer = ChatStyle.of("tools <tool_call> tool_calls"), read_offer([ADD])
    assert style.show(TALK, offer) == (TALK, {"tools": [ADD]})
    assert style.show(TALK, None) == (TALK, {})


def test_null_is_as_absent() -> None:
    function = {"name": "a", "description": None, "parameters": None, "strict": None}
    offer = read_offer([{"type": None, "function": function}], None)
    assert offer is not None and offer.shown == ({"function": {"name": "a"}},)
    assert read_offer([{"function": {"name": "a"}}]) == offer


def test_one_that_knows_none_is_shown_them_as_text() -> None:
    style, offer = ChatStyle.of("{{ messages }}"), read_offer([ADD])
    shown, options = style.show(TALK, offer)
    assert not options and [message["role"] for message in shown] == [
        *("system", "user", "assistant", "user"),
    ]
    assert shown[0]["content"].startswith("Be brief.") and '"add"' in shown[0]["content"]
    assert shown[2]["content"] == '{"name": "add", "arguments": {"a": 1}}'
    assert shown[3]["content"] == "Result: 1"
    several = {**TALK[2], "content": "So:", "tool_calls": [CALL, CALL]}
    ((_, found), _) = style.show([TALK[1], several], None)
    assert found["content"].startswith('So:\n[{"name"')
    ((first, *_), _) = style.show(TALK[1:], offer)
    assert first["role"] == "system"


def test_templates_read_the_arguments_that_clients_send_as_text() -> None:
    text = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}"
    template = ChatTemplate(text + "{% endfor %}{% endfor %}", {})
    assert template.render(TALK) == "1"
    odd = [{**TALK[2], "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}]
    assert template.render([TALK[1], *odd]) == ""
    template.close()


def test_the_bundled_model_calls_as_hermes_does() -> None:
    template = read_template(BUNDLED)
    assert template is not None
    style = ChatStyle.of(template.text)
    assert style.calls == HERMES and style.knows_tools and style.thinking is None
    template.close()


FAMILIES = {
    "qwen 3 coder": (
        "{% for t in tools %}{% endfor %}<tool_call>\n<function=a>\n<parameter=b>",
        call_formats.QWEN,
    ),
    "glm 4.6": ("{{ tools }}<tool_call>{name}\n<arg_key>{key}</arg_key>", call_formats.GLM),
    "lfm 2": ("{{ tools }}<|tool_list_start|>", call_formats.LFM2),
    "lfm 2.5": ("{{ tools }}<|tool_call_start|>[", call_formats.LFM2),
    "olmo 3": ("{{ tools }}<function_calls></function_calls>", call_formats.OLMO),
    "gemma 4": ("{{ tools }}<|tool_call>call:", call_formats.GEMMA),
    "function gemma": ("{{ tools }}<start_function_call>call:", call_formats.FUNCTION_GEMMA),
    "deepseek r1": ("<｜tool▁call▁begin｜>x\n```json\n", call_formats.DEEPSEEK_FENCED),
    "deepseek v3.1": ("<｜tool▁call▁begin｜>x<｜tool▁sep｜>", call_formats.DEEPSEEK),
    "minimax m2": ("{{ tools }}<minimax:tool_call>", call_formats.MINIMAX),
    "seed oss": ("{{ tools }}<seed:tool_call>", call_formats.SEED),
    "granite 3, phi 4 mini": ("{{ tools }}<|tool_call|>", call_formats.LISTED),
    "granite 4, ernie 4.5, smol 3": ("{{ tools }}<tool_call>", call_formats.HERMES),
    "llama 3.2 pythonic": (
        "ipython {{ tools }}[get_func(a=1, b=2), other_func(c)]",
        call_formats.PYTHONIC,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_newer_families_are_told_by_their_templates(name: str) -> None:
    template, calls = FAMILIES[name]
    assert ChatStyle.of(template).calls == calls


def test_reasoning_of_newer_families_comes_apart() -> None:
    gemma = ChatStyle.of("<|channel>thought\n<channel|>")
    assert gemma.begins_thinking("<|turn>model\n<|channel>thought\n")
    assert not gemma.begins_thinking("<|turn>model\n<|channel>thought\n<channel|>")
    for text in ("<|channel>thought\nHm.\n<channel|>Yes.", "<|channel>thought\n<channel|>Yes."):
        parser = gemma.parser(begun=False)
        found = Answer().add([*parser.feed(text), *parser.close()])
        assert (found.reasoning, found.content) == ("Hm." * ("Hm" in text), "Yes.")
    seed = ChatStyle.of("<seed:think></seed:think>").parser(begun=True)
    assert Answer().add(seed.feed("Hm.</seed:think>Yes.")) == Answer("Yes.", "Hm.")


def test_a_template_that_shows_no_calls_is_given_them_as_its_family_writes_them() -> None:
    style, offer = ChatStyle.of("{{ tools }}<|tool_list_start|>"), read_offer([ADD])
    shown, options = style.show(TALK, offer)
    assert options == {"tools": [ADD]} and shown[3] == TALK[3]
    assert shown[2] == {
        "role": "assistant",
        "content": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    }


def test_one_that_shows_no_tools_is_told_of_them_in_its_family_s_form() -> None:
    style = ChatStyle.of("{{ m.tool_calls }}<｜tool▁call▁begin｜>x<｜tool▁sep｜>")
    shown, options = style.show(TALK, read_offer([ADD]))
    assert not options and shown[1:] == TALK[1:]
    assert '<｜tool▁sep｜>{"PARAMETER": "VALUE"}<｜tool▁call▁end｜>' in shown[0]["content"]


def test_tools_go_by_the_name_that_the_template_reads() -> None:
    style, offer = ChatStyle.of("{% if xml_tools %}<tools><tool_call>"), read_offer([ADD])
    assert style.show(TALK[:2], offer)[1] == {"tools": [ADD], "xml_tools": [ADD]}


TAKEN = {  # how a template reads calls: with what it is given, it makes the text
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}": '{"a": 1}',
    "{% for c in m.tool_calls %}{{ 'x' + c.function.arguments }}{% endfor %}": 'x{"a": 1}',
    "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}": '{"a": 1}',
    "{% if m.tool_calls %}{{ 'x' if m.content is none else m.content + 'y' }}{% endif %}": "x",
    "{% if m.tool_calls %}{% if m.content is defined %}{{ m.content | length }}{% endif %}a"
    "{% endif %}": "a",
    "{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}": None,
}


@pytest.mark.parametrize("inner", TAKEN)
def test_templates_are_given_calls_as_they_take_them(inner: str) -> None:
    template = ChatTemplate(f"{{% for m in messages %}}{inner}{{% endfor %}}", {})
    wanted = TAKEN[inner]
    if wanted is None:
        with pytest.raises(RequestError, match="no calls"):
            template.render(TALK)
    else:
        assert template.render(TALK) == wanted
    template.close()
