from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dovetail.errors import ArtifactError, RequestError
from dovetail.runtime.chat import Message
from dovetail.runtime.chat_template import ChatTemplate, read_template

HELLO = [Message(role="user", content="{{ 7 * 7 }} <b>")]


def test_messages_are_data_and_no_template() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", {})
    assert template.render(HELLO) == "[user] {{ 7 * 7 }} <b>"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception('only users may speak') }}",
        "{{ messages[0].content + 5 }}",
    ],
)
def test_templates_stay_in_the_sandbox(text: str) -> None:
    with pytest.raises(RequestError, match="does not take these messages"):
        ChatTemplate(text, {}).render(HELLO)


def test_templates_have_what_those_of_models_use() -> None:
    text = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ thinking }}"
    )
    template = ChatTemplate(text, {"bos_token": "<s>"})
    found = template.render([*HELLO, *HELLO], options={"thinking": "off"})
    assert found == '<s>{"role": "user", "content": "{{ 7 * 7 }} <b>"}4off'


def test_a_file_goes_before_the_configuration(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    config = {
        "chat_template": [
            {"name": "tools", "template": "no"},
            {"name": "default", "template": "a"},
        ],
        "bos_token": {"content": "<s>"},
    }
    (tmp_path / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    named = read_template(tmp_path)
    assert named is not None and named.render(HELLO) == "a"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}b")
    found = read_template(tmp_path)
    assert found is not None and found.render(HELLO) == "<s>b"


def test_a_wrong_template_is_told_at_once() -> None:
    with pytest.raises(ArtifactError, match="chat template is wrong"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("seed", range(3))
def test_prompts_equal_those_of_transformers(seed: int) -> None:
    """The bundled template through transformers' own renderer."""
    transformers = pytest.importorskip("transformers")
    from dovetail.tiny_world import LLAMA

    turns = ["Hi <|end|>", "Yes.\n", "  What? "][: seed + 1]
    roles = ("user", "assistant", "user")
    messages = [Message(role=r, content=t) for r, t in zip(roles, turns, strict=False)]
    ours = read_template(LLAMA)
    assert ours is not None
    theirs = transformers.AutoTokenizer.from_pretrained(LLAMA).apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours.render(messages) == theirs
