"""Grammars of calls of tools, as families write them: what `required`, a name and `strict` hold.

In: an offer of tools, the style of a chat template. Out: Lark. What a grammar lets through, the
reader of the same format (`answers.py`) reads as a call that the schema allows.
"""

from __future__ import annotations

import json
from dataclasses import replace

from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text.answers import Thinking
from dovetail.runtime.text.argument_grammar import ANYTHING, MAX_LETTERS, Arguments, Literal
from dovetail.runtime.text.call_formats import NAMED, OBJECT, PLAIN, CallFormat, cut_mark
from dovetail.runtime.text.grammar import ANSWER, json_rule, quote
from dovetail.runtime.text.harmony import HARMONY_CALLS
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.runtime.text.tools import AUTO, ChatStyle, Offer, Tool

MAX_CALLS = 32
"""Calls of an answer that must have some: a model that knows no end finds one."""
ANY_OBJECT = '{"type": "object"}'


def write_mark(tokenizer: Tokenizer, mark: str) -> str:
    """Return a mark of calls or reasoning as a grammar of a model has it."""
    tokens = [(piece, tokenizer.find_special(piece)) for piece in cut_mark(mark)]
    return " ".join(quote(p) if token is None else f"<[{token}]>" for p, token in tokens)


def frame(
    form: StructuredOutputs, thinking: Thinking | None, literal: Literal, *, begun: bool
) -> StructuredOutputs:
    """Return a form with the reasoning that may go before it; `begun`: the prompt began it."""
    if thinking is None:
        return form
    first, rules = _write_thinking(thinking, literal, begun=begun)
    head = f"{literal(thinking.answer)} " if thinking.answer else ""
    return replace(form, around="\n".join([f"start: {first}{head}@{ANSWER}", *rules]))


def call_grammar(offer: Offer, style: ChatStyle, literal: Literal, *, begun: bool) -> str | None:
    """Return the grammar of an answer that must be calls, or whose calls must be right.

    None where nothing is asked of them. `begun`: the prompt ends within reasoning.
    """
    wanted = [tool for tool in offer.tools if tool.name in (offer.allowed or (tool.name,))]
    if not (offer.forced or offer.allowed or any(tool.strict for tool in wanted)):
        return None
    form = style.calls
    rules, left = list[str](), MAX_LETTERS
    for place, tool in enumerate(wanted):
        own = _write_call(place, tool, form, literal, offer, left)
        rules += own
        left -= sum(map(len, own))
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(wanted))))
    single = offer.named or not offer.parallel
    rules += _write_calls(form, literal, more=0 if single else MAX_CALLS - 1)
    first, thought = "", list[str]()
    if style.thinking is not None:
        first, thought = _write_thinking(style.thinking, literal, begun=begun)
    talk = offer.choice == AUTO
    rules += _write_talk(style, literal, single=single) if talk else ["answer: calls"]
    return "\n".join([*rules, f"start: {first}answer", *thought])


def _write_thinking(thinking: Thinking, literal: Literal, *, begun: bool) -> tuple[str, list[str]]:
    """Return what stands before an answer, and the rules of that."""
    begin, end = literal(thinking.begin), literal(thinking.end)
    if end.startswith('"'):
        inside = ["thought", f"thought[lazy]: {ANYTHING} {end}"]
    else:
        inside = [f"THOUGHT {end}", f"THOUGHT: {ANYTHING}"]
    opening = "" if begun else f"{begin} "
    rules = [f'think: {opening}{inside[0]} ("\\n" | "\\n\\n")?', inside[1]]
    return "think " if begun else "think? ", rules


def _write_call(
    place: int, tool: Tool, form: CallFormat, literal: Literal, offer: Offer, most: int
) -> list[str]:
    """Return the rules of a call of one tool. In AUTO the strict ones' arguments alone are held."""
    schema = tool.parameters if offer.forced or tool.strict else ANY_OBJECT
    head = literal(form.open + tool.name + form.named)
    if form.kind == OBJECT:
        head = quote(f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ')
    close = quote("}") if form.kind == OBJECT else literal(form.close) if form.close else ""
    call = f"call_{place}: {head} args_{place} {close}"
    if form.kind in (OBJECT, NAMED):
        return [call, f"args_{place}: {json_rule(schema)}"]
    arguments = Arguments(form, literal, json.loads(schema), f"args_{place}", most)
    return [call, *arguments.write()]


def _write_calls(form: CallFormat, literal: Literal, *, more: int) -> list[str]:
    """Return the rules of one call and up to so many `more`, in a format.

    `marked` is what follows the mark of a format that has one.
    """
    inner = "call"
    if form.divider is not None:
        divider = f"{quote(form.divider)} " if form.divider else ""
        inner += " " + _repeat(f"{divider}call", more)
    before = quote(form.before) if form.before else ""
    if form.before.startswith(" "):
        before = f'" "? {quote(form.before.strip())}'
    marked = " ".join(filter(None, (before, inner, _end(form, literal))))
    if form is PLAIN:
        return [f"calls: call | {marked}" if more else "calls: call"]
    if form.bare:
        return [f"calls: {marked}"]
    begin = literal(form.begin)
    more *= form.divider is None and form is not HARMONY_CALLS  # behind one of which an answer ends
    again = _repeat(f"{quote(form.again) if form.again else ''} {begin} marked", more)
    return [f"marked: {marked}", f"calls: {begin} marked {again}"]


def _end(form: CallFormat, literal: Literal) -> str:
    """Return what stands behind calls, with the mark of a format that has one."""
    after = quote(form.after) if form.after else ""
    return f"{after} {literal(form.end)}" if form.end else after


def _repeat(item: str, most: int) -> str:
    return f"({item}){{0,{most}}}" if most else ""


def _write_talk(style: ChatStyle, literal: Literal, *, single: bool) -> list[str]:
    """Return the rules of an answer that may hold calls: whatever begins one goes on as one."""
    words, form = f"WORDS: {ANYTHING}", style.calls
    if style.thinking and style.thinking.answer:
        return [f"answer: calls | {literal(style.thinking.answer)} WORDS", words]
    if form.bare:
        thought = style.thinking.begin[0] if style.thinking else ""
        others = thought.replace("[", "")  # which begins a list of calls, too
        return ["answer: calls | WORDS", f"WORDS: /([^\\s{{\\[`{others}](?s:.*))?/"]
    begin = literal(form.begin)
    if not begin.startswith('"'):
        return ["answer: WORDS calls?", words]
    called = "(head marked)" + ("?" if single else "*")
    return [f"answer: {called} WORDS", f"head[lazy]: {ANYTHING} {begin}", words]
