"""How families of models write calls of tools: a table, what reads a call's head by it, a writer.

In: names of tools and their arguments. Out: the text of calls, as a model of a family writes it.
Readers and grammars follow the same table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

OBJECT, NAMED, TAGS, LITERAL = "object", "named", "tags", "literal"
"""How arguments are written: with the name in a JSON object; as one behind the name; each between
tags; as literals of Python or the like behind the name."""
FENCE = "```"
ARGS = "[ARGS]"
Called: TypeAlias = Iterable[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class CallFormat:
    """The texts that stand around the parts of calls.

    begin, end: marks around calls, "" where there are none. before, after: what stands within the
    marks. divider: between calls within them; None: each call has marks of its own, and `again`
    between those. bare: whether an answer may begin with a call that has no mark.

    open, named, close: before a tool's name, behind it, and behind its arguments. arguments: their
    key in an object. key, keyed, valued: before an argument's name, behind it, and behind its
    value; comma: between arguments. quote: stands around texts, in which nothing is escaped; "":
    texts are as Python or JSON has them.

    White space in these is what the family writes; what is read may have more of it or none.
    """

    begin: str = ""
    end: str = ""
    kind: str = OBJECT
    bare: bool = False
    before: str = ""
    after: str = ""
    divider: str | None = None
    again: str = ""
    open: str = ""
    named: str = ""
    close: str = ""
    arguments: str = "arguments"
    key: str = ""
    keyed: str = ""
    valued: str = ""
    comma: str = ""
    quote: str = ""

    @cached_property
    def head(self) -> Head | None:
        """What stands before a call's arguments; None where calls are objects alone."""
        if not self.named:
            return None
        ends = {NAMED: r"(?=\{)", OBJECT: r"(?=\{)", TAGS: r"(?=[\s<])" if self.glued else ""}
        return Head(self.open, NAME, self.named, ends.get(self.kind, ""))

    @property
    def glued(self) -> bool:
        """Whether white space alone stands behind a name."""
        return self.named.isspace()

    @cached_property
    def argument(self) -> Head:
        """What stands before an argument's value."""
        return Head(self.key, KEY, self.keyed.rstrip())

    @cached_property
    def starts(self) -> tuple[str, ...]:
        """Marks that calls begin with: an outer one that models forget, and the inner one."""
        inner = self.open if self.open.startswith("<") else ""
        return tuple(filter(None, (self.begin, inner)))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Marks that stand behind a call, and before the next one."""
        closing = cut_mark(self.close.strip()) if self.kind in (NAMED, TAGS) else []
        fence = [FENCE] if self.bare else []
        return tuple(filter(None, (*closing, self.end, self.begin, *fence)))

    @cached_property
    def marks(self) -> frozenset[str]:
        """All pieces of it that may be special tokens."""
        around = (self.begin, self.end, self.open, self.named, self.close)
        texts = (*around, self.key, self.keyed, self.valued, self.quote)
        return frozenset(piece for text in texts for piece in cut_mark(text))


NAME, KEY = r"[A-Za-z0-9_.-]{1,64}", r"[^<>\"\n]{1,256}"
LOOSE = {
    ARGS: [r"(?:\[[A-Z_]*(?:\]\w*)?){0,4}", r"\s*"],
    "\n```json\n": [r"[\s`]{0,16}", r"\w{0,16}", r"\s*"],
}
"""What is read as if it were such a text: with the call's id, without a fence."""


class Head:
    """A name with what stands around it, as it is found at the beginning of a text."""

    def __init__(self, before: str, name: str, after: str, ends: str = "") -> None:
        """`name`, `ends`: expressions; `ends` is what must follow and is not part of it."""
        atoms = [*_atoms(before), f"({name})", *_atoms(after)]
        self._whole = re.compile("".join(atoms) + ends)
        begun = ""
        for atom in reversed(atoms):
            begun = f"(?:{atom}{begun})?"
        self._begun = re.compile(begun)

    def find(self, text: str) -> tuple[str, int] | None:
        """Return the name that a text begins with, and where it ends; None where that is none."""
        found = self._whole.match(text)
        return (found[1], found.end()) if found else None

    def may_come(self, text: str) -> bool:
        """Tell whether a text may yet go on as one."""
        return self._begun.fullmatch(text) is not None


def _atoms(text: str) -> list[str]:
    """Return a text as expressions, of which each may end what has come so far."""
    if text in LOOSE:
        return LOOSE[text]
    pieces = re.findall(r"\s+|\S", text)
    return [r"\s*" if piece.isspace() else re.escape(piece) for piece in pieces]


SPECIAL = re.compile(r"(<[^<>\s]+>)")
"""How special tokens look that are parts of marks."""


def cut_mark(mark: str) -> list[str]:
    """Return a mark in pieces, of which some may be special tokens."""
    return [piece for piece in SPECIAL.split(mark) if piece]


# ---- families ----

HERMES = CallFormat("<tool_call>", "</tool_call>", before="\n", after="\n", again="\n")
LLAMA = CallFormat("<|python_tag|>", bare=True, arguments="parameters", divider="; ")
MISTRAL = CallFormat("[TOOL_CALLS]", before=" [", after="]", divider=", ", named=ARGS)
MISTRAL_NAMED = CallFormat("[TOOL_CALLS]", kind=NAMED, named=ARGS)
PLAIN = CallFormat(bare=True, before="[", after="]", divider=", ")
"""JSON alone: what a model is asked for whose template knows no tools."""
QWEN = CallFormat(
    "<tool_call>",
    "</tool_call>",
    TAGS,
    before="\n",
    after="\n",
    again="\n",
    open="<function=",
    named=">\n",
    close="</function>",
    key="<parameter=",
    keyed=">\n",
    valued="\n</parameter>\n",
)
SEED = replace(
    QWEN, begin="<seed:tool_call>", end="</seed:tool_call>", keyed=">", valued="</parameter>\n"
)
GLM = CallFormat(
    "<tool_call>",
    "</tool_call>",
    TAGS,
    again="\n",
    named="\n",
    key="<arg_key>",
    keyed="</arg_key>\n<arg_value>",
    valued="</arg_value>\n",
)
MINIMAX = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    TAGS,
    before="\n",
    divider="",
    open='<invoke name="',
    named='">\n',
    close="</invoke>\n",
    key='<parameter name="',
    keyed='">',
    valued="</parameter>\n",
)
PYTHONIC = CallFormat(
    kind=LITERAL,
    bare=True,
    before="[",
    after="]",
    divider=", ",
    named="(",
    close=")",
    keyed="=",
    comma=", ",
)
LFM2 = replace(PYTHONIC, begin="<|tool_call_start|>", end="<|tool_call_end|>", bare=False)
OLMO = replace(
    LFM2, begin="<function_calls>", end="</function_calls>", before="\n", after="\n", divider="\n"
)
GEMMA = CallFormat(
    "<|tool_call>",
    "<tool_call|>",
    LITERAL,
    open="call:",
    named="{",
    close="}",
    keyed=":",
    comma=",",
    quote='<|"|>',
)
FUNCTION_GEMMA = replace(
    GEMMA, begin="<start_function_call>", end="<end_function_call>", quote="<escape>"
)
DEEPSEEK = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    NAMED,
    divider="",
    open="<｜tool▁call▁begin｜>",
    named="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    divider="\n",
    open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    named="\n```json\n",
    close="\n```<｜tool▁call▁end｜>",
)
LISTED = CallFormat("<|tool_call|>", before="[", after="]", divider=", ")
TOOLCALL = replace(LISTED, begin="<TOOLCALL>", end="</TOOLCALL>")
TOOL_CALLS = replace(LISTED, begin="<tool_calls>", end="</tool_calls>")

FAMILIES: tuple[tuple[str, CallFormat], ...] = (
    (r"\[TOOL_CALLS\](?=[\s\S]*\[ARGS\])", MISTRAL_NAMED),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<｜tool▁call▁begin｜>(?=[\s\S]*```json)", DEEPSEEK_FENCED),
    (r"<｜tool▁call▁begin｜>", DEEPSEEK),
    (r"<minimax:tool_call>", MINIMAX),
    (r"<seed:tool_call>", SEED),
    (r"<\|tool_call_start\|>|<\|tool_list_start\|>", LFM2),
    (r"<function_calls>", OLMO),
    (r"<\|tool_call>", GEMMA),
    (r"<start_function_call>", FUNCTION_GEMMA),
    (r"<tool_call>(?=[\s\S]*<function=)", QWEN),
    (r"<tool_call>(?=[\s\S]*<arg_key>)", GLM),
    (r"<\|tool_call\|>", LISTED),
    (r"<TOOLCALL>", TOOLCALL),
    (r"<tool_calls>", TOOL_CALLS),
    (r"<tool_call>", HERMES),
    (r"\[\w*func\w*\(\w+=", PYTHONIC),
    (r"<\|python_tag\|>|ipython", LLAMA),
)
"""What a chat template of a family holds; the first one that is found counts."""


def find_format(template: str) -> CallFormat | None:
    """Return the format of calls that a chat template tells of."""
    return next((form for held, form in FAMILIES if re.search(held, template)), None)


# ---- writing ----


def write_calls(form: CallFormat, calls: Called) -> str:
    """Return calls as a model writes them."""
    begin, written = "" if form.bare else form.begin, [_write_call(form, *one) for one in calls]
    if form.divider is not None:
        if form is PLAIN and len(written) == 1:
            return written[0]
        written = [form.divider.join(written)]
    return form.again.join(f"{begin}{form.before}{one}{form.after}{form.end}" for one in written)


def _write_call(form: CallFormat, name: str, arguments: Mapping[str, Any]) -> str:
    if form.kind == OBJECT:
        return _json({"name": name, form.arguments: arguments})
    if form.kind == NAMED:
        inner = _json(arguments)
    else:
        inner = form.comma.join(
            f"{form.key}{key}{form.keyed}{_write_value(form, value)}{form.valued}"
            for key, value in arguments.items()
        )
    return f"{form.open}{name}{form.named}{inner}{form.close}"


def _write_value(form: CallFormat, value: Any) -> str:
    if form.kind == TAGS:
        return value if isinstance(value, str) else _json(value)
    if not form.quote:
        return repr(value) if isinstance(value, bool) or value is None else _json(value)
    match value:
        case str():
            return f"{form.quote}{value}{form.quote}"
        case dict():
            inner = (f"{key}:{_write_value(form, one)}" for key, one in value.items())
            return f"{{{','.join(inner)}}}"
        case list():
            return f"[{','.join(_write_value(form, one) for one in value)}]"
    return _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
