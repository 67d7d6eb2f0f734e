from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.errors import ArtifactError, DeviceError, RequestError
from dovetail.runtime.child.child import Child
from dovetail.runtime.machine.cpu_time import process_seconds
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text import template_process
from dovetail.runtime.text.chat_template import ChatTemplate, Message, read_template
from dovetail.runtime.text.template_process import (
    NICE,
    SHARED,
    Renderer,
    _RenderProcess,
    _TemplateJob,
)
from dovetail.runtime.text.template_worker import Render, Teach, TryForm
from dovetail.tiny_world import LLAMA
from tests.processes import running

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


def test_the_template_of_a_processor_stands_in_where_there_is_no_other(tmp_path: Path) -> None:
    """Mistral Small 3.1 has its template there alone."""
    (tmp_path / "chat_template.json").write_text('{"chat_template": "a{{ bos_token }}"}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    found = read_template(tmp_path)
    assert found is not None and found.render(HELLO) == "a<s>"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "b"}')
    found = read_template(tmp_path)
    assert found is not None and found.render(HELLO) == "b"


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"]
)
def test_a_file_that_is_no_text_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"chat_template": "\xff"}')
    with pytest.raises(ArtifactError, match=f"{name}: cannot be decoded"):
        read_template(tmp_path)


def test_a_wrong_template_is_told_at_once() -> None:
    with pytest.raises(ArtifactError, match="chat template is wrong"):
        ChatTemplate("{% for %}", {})


def test_the_tokens_of_an_old_tokenizer_lie_beside_it(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}|{{ image_token }}|{{ eos_token is defined }}"}
    config["extra_special_tokens"] = {"image_token": "<img>"}  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    (tmp_path / "special_tokens_map.json").write_bytes(
        msgspec.json.encode({"bos_token": {"content": "<s>", "lstrip": False}})
    )
    found = read_template(tmp_path)
    assert found is not None and found.render(HELLO) == "<s>|<img>|False"


def test_what_is_set_in_a_generation_block_ends_with_it() -> None:
    text = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert ChatTemplate(text, {}).render(HELLO) == "21"


def test_parts_are_joined_where_the_template_takes_texts_alone() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    for expression in ("m.content", "m.content | tojson", "'x' + m.content"):
        text = "{% for m in messages %}{{ " + expression + " }}{% endfor %}"
        assert "a\nb" in ChatTemplate(text, {}).render(messages).replace("\\n", "\n")


def test_null_in_a_message_is_what_is_absent() -> None:
    """Templates ask whether a name is there; of a tool that gave nothing back they read a text."""
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}", {})
    nothing: Any = {"name": None, "tool_calls": None, "reasoning": None, "tool_call_id": None}
    for made in (dict, Message):
        rendered = template.render([made(role="user", content="a", **nothing)])
        assert json.loads(rendered) == {"role": "user", "content": "a"}
        rendered = template.render([made(role="tool", content=None, **nothing)])
        assert json.loads(rendered) == {"role": "tool", "content": ""}


ENDLESS = (
    "{% for m in messages %}{% if 'loop' in m.content %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)
LOOP = [Message(role="user", content="loop")]


@pytest.mark.parametrize(
    ("text", "why", "deadline"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "0.2 s",
         0.2),
        ("{{ lipsum(n=100000000) }}", "0.2 s", 0.2),
        ("{% set x = namespace(a='ab') %}{% for i in range(40) %}{% set x.a = x.a + x.a %}"
         "{% endfor %}", "256 MiB", 1e6),
        ("{{ 'a' * (messages | length) * 10 ** 10 }}", "256 MiB", 1e6),
    ],
)  # fmt: skip
def test_a_template_that_takes_too_much_is_refused_and_others_are_served(
    text: str, why: str, deadline: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CPU time or memory: on a busy machine a nice process gets little in five deadlines."""
    process = "dovetail.runtime.text.template_process"
    monkeypatch.setattr(f"{process}.DEADLINE", deadline)
    monkeypatch.setattr(f"{process}.DEADLINES", 10**9)
    monkeypatch.setattr("dovetail.runtime.text.chat_template.SHARED", Renderer())
    honest, greedy = ChatTemplate("{{ messages[0].content }}", {}), ChatTemplate(text, {})
    for _ in range(2):
        with pytest.raises(RequestError, match=f"does not take these messages: .*{why}"):
            greedy.render(HELLO)
        assert honest.render(HELLO) == HELLO[0].content


def test_a_busy_machine_does_not_cost_a_conversation_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process is said to have had no CPU time, so that it has all its chances."""
    process = "dovetail.runtime.text.template_process"
    for name, value in {"SOON": 1e-3, "DEADLINE": 1e-2, "DEADLINES": 10**9}.items():
        monkeypatch.setattr(f"{process}.{name}", value)
    monkeypatch.setattr(f"{process}.process_seconds", lambda pid: 0.0)
    monkeypatch.setattr("dovetail.runtime.text.chat_template.SHARED", Renderer())
    long = "{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}done"
    template = ChatTemplate(long, {})
    assert template.render(HELLO) == "done"
    template.close()


def test_others_do_not_wait_for_a_conversation_that_burns_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline is made endless: who waited for it would wait for ever.

    `SOON` is made long: on a busy machine a conversation that burns nothing may take 0.1 s, too.
    """
    monkeypatch.setattr("dovetail.runtime.text.template_process.DEADLINE", 1e6)
    monkeypatch.setattr("dovetail.runtime.text.template_process.SOON", 3.0)
    renderer = Renderer()
    monkeypatch.setattr("dovetail.runtime.text.chat_template.SHARED", renderer)
    template = ChatTemplate(ENDLESS, {})

    async def ask() -> list[str]:
        burning = asyncio.wrap_future(template.start(LOOP))
        await asyncio.sleep(0)
        found = [await asyncio.wrap_future(template.start(HELLO)) for _ in range(20)]
        assert not burning.done()
        burning.cancel()
        return found

    assert set(asyncio.run(ask())) == {HELLO[0].content}
    quick, patient = renderer.pids
    assert quick is not None and patient is not None
    nicest = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
    while os.getpriority(os.PRIO_PROCESS, patient) != nicest:
        os.sched_yield()  # it is being started
    template.close()
    assert renderer.pids == (None, None) and not running([quick, patient])


def test_a_process_that_is_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.runtime.text.template_process.LEARN_SECONDS", 5.0)
    template = ChatTemplate("{{ messages[0].content }}", {})
    for number in (signal.SIGKILL, signal.SIGSTOP):
        template.render(HELLO)  # whose process knows it now: one that is to learn is waited for
        pid = SHARED.pids[0]
        assert pid is not None
        os.kill(pid, number)
        assert template.render(HELLO) == HELLO[0].content
        assert SHARED.pids[0] != pid


def test_processes_that_are_killed_while_idle_cost_no_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = Renderer()
    monkeypatch.setattr("dovetail.runtime.text.chat_template.SHARED", renderer)
    template = ChatTemplate("{{ messages[0].content }}", {})
    job = _TemplateJob(Teach("other", "", {}))
    renderer._patient.put(job)
    job.future.result()
    for pid in renderer.pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(HELLO) == HELLO[0].content
    renderer._patient.put(job := _TemplateJob(Teach("other", "", {})))
    assert job.future.result() == ""
    template.close()


def test_what_is_under_way_when_its_process_is_closed_goes_nowhere_else() -> None:
    beyond = _RenderProcess(1e6, NICE)
    process, job = _RenderProcess(1e6, 0, beyond), endless_job()
    process.put(job)
    while process.pid is None or process_seconds(process.pid) < 0.5:
        os.sched_yield()  # it is beginning, and learns the template
    process.close()
    found = job.future.done() and job.future.exception()
    beyond.close()
    assert isinstance(found, RequestError) and "closed" in str(found)


def test_a_process_that_is_closed_while_it_is_started_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, job, starting = _RenderProcess(1e6, 0), endless_job(), threading.Event()
    start = template_process.Child.start

    def start_late(*given: str) -> Child:
        child = start(*given)
        starting.set()
        process.put(probe := endless_job())
        while not probe.future.done():  # it is told at once when nothing is taken any more
            os.sched_yield()
            process.put(probe := endless_job())
        return child

    monkeypatch.setattr(template_process.Child, "start", start_late)
    process.put(job)
    assert starting.wait(60)
    closing = threading.Thread(target=process.close, daemon=True)
    closing.start()
    with pytest.raises(RequestError, match="closed"):
        job.future.result(60)
    closing.join(60)
    assert not closing.is_alive() and process.pid is None


def endless_job() -> _TemplateJob:
    teach = Teach("endless", ENDLESS, {})
    conversation = (
        b'{"messages": [{"content": "loop"}], "add_generation_prompt": true, "options": {}}'
    )
    return _TemplateJob(Render(teach.key, conversation), teach)


def test_memory_that_the_first_form_uses_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = StructuredOutputs(json="[" + "[]," * 5_000_000 + "[]]")
    monkeypatch.setattr(template_process, "FIRST_FORM", TryForm(greedy))
    renderer = Renderer()
    renderer.take()
    with pytest.raises(DeviceError, match=r"structured output is not available: .* 256 MiB"):
        renderer.try_form(StructuredOutputs(json_object=True)).result()
    renderer.give_back()


def test_the_last_template_ends_the_process() -> None:
    one, other = ChatTemplate("a", {}), ChatTemplate("b", {})
    one.close()
    assert other.render(HELLO) == "b"
    with pytest.raises(RequestError, match="closed"):
        one.render(HELLO)


def test_a_template_is_not_read_in_this_process_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja computes constants as it compiles; this takes hours."""
    monkeypatch.setattr("dovetail.runtime.text.template_process.LEARN_SECONDS", 1.0)
    with pytest.raises(ArtifactError, match="chat template is wrong: it is not read within 1 s"):
        ChatTemplate("{{ 10 ** (10 ** 8) }}", {})


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(RequestError, match="not JSON"):
        ChatTemplate("a", {}).render(HELLO, options={"tools": [print]})
    with pytest.raises(RequestError, match="not JSON"):
        ChatTemplate("a", {}).render(HELLO, options=3)  # type: ignore[arg-type]


USER = {"role": "user", "content": "Où? <b> & 'quoted' \"twice\" {{ 1 }}"}
TALK = [
    {"role": "system", "content": "Be brief.\n"},
    USER,
    {"role": "assistant", "content": "  Là.  ", "reasoning": "far"},
    {"role": "user", "content": "And then?", "name": None},
]
CALLS = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, None]}}}
        ],
    },
    {"role": "tool", "content": '{"é": 1}', "name": "f", "tool_call_id": "c1"},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": {"b": 1, "a": "<x>"}}}}]
DOCUMENTS = [{"title": "T", "text": "Text"}]
EACH = "{% for m in messages %}"
SIDES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "generation block": (
        EACH + "{% if m.role == 'assistant' %}{%- generation -%}\n<a>{{ m.content }}</a>\n"
        "{%- endgeneration %}\n{% else %}\n  <u>{{ m.content }}</u>\n{% endif %}\n{% endfor %}",
        TALK,
        {},
    ),
    "generation block that uses the loop": (
        EACH + "{% set x = loop.index %}{% generation %}{{ x }}{% if not loop.last %},{% endif %}"
        "{% set x = 9 %}{% endgeneration %}{{ x }}{% endfor %}",
        TALK,
        {},
    ),
    "namespace set in a generation block": (
        "{% set ns = namespace(seen=0) %}"
        + EACH
        + "{% generation %}{% set ns.seen = ns.seen + 1 %}"
        "{% endgeneration %}{% endfor %}{{ ns.seen }}",
        TALK,
        {},
    ),
    "break and continue": (
        EACH + "{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
        TALK,
        {},
    ),
    "blocks are trimmed": (
        "   {% for m in messages %}\n  {{ m.role }}\n\t{% endfor %}\n\n  {# a remark #}\nend \n",
        TALK,
        {},
    ),
    "white space is kept elsewhere": ("{{ '\\n' }}\n {{ messages[2].content }} \n\n", TALK, {}),
    "json": ("{{ messages | tojson }}", CALLS, {}),
    "json with indents": (
        "{{ tools | tojson(indent=2) }}{{ tools | tojson(indent='\t') }}",
        [USER],
        {"tools": TOOLS},
    ),
    "json with separators": (
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}{{ tools | tojson(true) }}",
        [USER],
        {"tools": TOOLS},
    ),
    "tools": (
        "{% if tools %}{% for t in tools %}{{ t.function | items | list }}{% endfor %}{% endif %}",
        CALLS,
        {"tools": TOOLS},
    ),
    "no tools": (
        "{{ tools is defined }}{{ tools is none }}{{ tools is not none }}{{ documents is none }}",
        [USER],
        {},
    ),
    "documents": (
        "{% for d in documents %}{{ d.title }}: {{ d['text'] }}{% endfor %}",
        [USER],
        {"documents": DOCUMENTS},
    ),
    "calls": (
        EACH + "{{ m.content is defined }}{{ m.name }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        CALLS,
        {},
    ),
    "what is none is not there": (
        EACH + "{{ m | length }}{{ m.keys() | list }}{% endfor %}",
        TALK,
        {},
    ),
    "reasoning": (EACH + "{{ m.reasoning_content }}|{{ m.thinking }}|{% endfor %}", TALK, {}),
    "parts": (
        EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}{% endif %}{% endfor %}",
        PARTS,
        {},
    ),
    "special tokens": (
        "{{ bos_token is defined }}{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ sep_token }}",
        [USER],
        {},
    ),
    "a special token that is given": ("{{ eos_token }}", [USER], {"eos_token": "<!>"}),
    "options of its own": (
        "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}",
        [USER],
        {"enable_thinking": False},
    ),
    "years": ("{{ strftime_now('%Y') }}", [USER], {}),
    "macros, filters and slices": (
        "{% macro show(m, mark='-') %}{{ mark }}{{ m.content | trim | upper }}{% endmacro %}"
        "{% for m in messages[::-1] %}{{ show(m, mark=loop.index0 | string) }}{% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }}{{ 'a-b'.split('-')[-1] }}"
        "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
        TALK,
        {},
    ),
    "a call block": (
        "{% macro box() %}[{{ caller() }}]{% endmacro %}" + EACH + "{% call box() %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endcall %}{% endfor %}",
        TALK,
        {},
    ),
    "dictionaries": ("{% set d = dict(a=1) %}{{ d.a }}{{ dict(messages[0]).role }}", TALK, {}),
}


@pytest.fixture(scope="module")
def theirs_of() -> Any:
    """The bundled model's `apply_chat_template` of transformers, without token ids."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(LLAMA)
    return partial(tokenizer.apply_chat_template, tokenize=False)


@pytest.mark.parametrize("prompted", [False, True])
@pytest.mark.parametrize("name", SIDES)
def test_templates_render_as_transformers_renders_them(
    theirs_of: Any, name: str, prompted: bool
) -> None:
    text, messages, options = SIDES[name]
    text += "{% if add_generation_prompt %}\n<|assistant|>{% endif %}"
    theirs = theirs_of(messages, chat_template=text, add_generation_prompt=prompted, **options)
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    ours = ChatTemplate(text, special)
    assert ours.render(messages, add_generation_prompt=prompted, options=options) == theirs


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ ''.__class__.mro() }}",
        "{{ messages[0].role.x.y }}",
        "{{ messages | tojson(colour='red') }}",
    ],
)
def test_what_transformers_refuses_is_refused(theirs_of: Any, text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - of many kinds
        theirs_of([USER], chat_template=text)
    with pytest.raises(RequestError, match="does not take these messages"):
        ChatTemplate(text, {}).render([USER])


@pytest.mark.parametrize("seed", range(3))
def test_prompts_equal_those_of_transformers(theirs_of: Any, seed: int) -> None:
    """The bundled template through transformers' own renderer."""
    turns = ["Hi <|end|>", "Yes.\n", "  What? "][: seed + 1]
    roles = ("user", "assistant", "user")
    messages = [Message(role=r, content=t) for r, t in zip(roles, turns, strict=False)]
    ours = read_template(LLAMA)
    assert ours is not None
    theirs = theirs_of(
        [{"role": m.role, "content": m.content} for m in messages], add_generation_prompt=True
    )
    assert ours.render(messages) == theirs
