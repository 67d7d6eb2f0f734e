"""Forms of answers as grammars that llguidance follows, and whether it can.

In: a form (`schedule/structured.py`). Out: the grammar's text, or why there is none. Grammars are
programs: those of users are written and tried in a process with bounds (`template_process.py`), and
no other room but the engine's imports llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.structured import StructuredOutputs

if TYPE_CHECKING:
    import llguidance

SPACE = r"( |\n[ \t]{0,32})"
"""White space between the parts of JSON: a model that has lost its way ends it at some time."""
ANSWER = "answer"
"""What the grammar around a form calls that."""
FUEL, STEP_FUEL, STEP_ITEMS = 1_000_000, 200_000, 50_000
"""llguidance's own: some 20 ms to read a grammar's expressions, 15 ms and 3 ms of a step."""
STATES = 16_384
"""Of a grammar's lexer, 1 to 2 kB each; llguidance allows 250,000."""
SYMBOLS = 200_000
OVERLAYS = {"anyOf", "oneOf", "$ref", "const", "enum"}
OPENS = {"additionalProperties", "patternProperties", "minProperties", "unevaluatedProperties"}
NAMED = ("properties", "$defs", "definitions", "patternProperties")
BELOW = ("items", "prefixItems", "allOf", "anyOf", "oneOf", "additionalProperties")
"""Keywords with schemas: laid over others, of properties without a name, under names, in place."""
MAX_OPTIONAL = 400
"""Parts of expressions that may be left out, in all. What comes next in a row of them takes time by
the cube of their number: 0.3 s of so many, a minute of 3,000."""
TOKEN = "<[3]>"
"""Any token of the vocabulary that grammars are tried with."""
_OPTIONAL = re.compile(r"[?*]|\{0?,|\|\)|\(\|")
_EXPRESSION = re.compile(r'"(?:[^"\\]|\\.)*"|/((?:[^/\\]|\\.)*)/|%json (.*)')
"""In Lark a text, of which nothing is kept, an expression, or a schema."""
_TOKENS = re.compile(r"<\[\d+\]>")
_PLACE = re.compile(
    r"^at \d+\(\d+\): (failed to compile JSON schema: )?|(?<=regex parse error):.*?\nerror(?=: )",
    re.DOTALL,
)
_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]", re.DOTALL)


def make_limits() -> llguidance.LLParserLimits:
    """Return what a grammar is held to, where it is tried and where it is followed.

    Large expressions are not run over the vocabulary beforehand: that takes minutes of a bad one.
    """
    import llguidance  # noqa: PLC0415 - only who asks for a form needs it

    return llguidance.LLParserLimits(
        initial_lexer_fuel=FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=STATES,
        max_grammar_size=SYMBOLS,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def try_grammar(form: StructuredOutputs) -> str:
    """Return the grammar of a form; RequestError where llguidance does not take it.

    It is read and begun as the engine will do it, but for letters instead of a model's tokens.
    """
    import llguidance  # noqa: PLC0415

    _check_optional(form)
    text = _write(form)
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), _TOKENS.sub(TOKEN, text), limits=make_limits(), log_level=0
    )
    if not matcher.is_error():  # what may follow the first token is found with that
        allowed = matcher.compute_logit_bias()
        matcher.try_consume_tokens([next((at for at, bias in enumerate(allowed) if bias), 0)])
    if matcher.is_error():
        raise RequestError(explain(matcher.get_error(), form))
    return text


def _check_optional(form: StructuredOutputs) -> None:
    """Raise RequestError where expressions of callers have too many parts that may be left out."""
    texts = [form.regex or "", form.grammar or "", *_find_expressions(form.written)]
    if form.json:
        texts = list(_find_patterns(json.loads(form.json)))
    count = sum(len(_OPTIONAL.findall(text)) for text in texts)
    if count > MAX_OPTIONAL:
        raise RequestError(
            f"structured output may have {MAX_OPTIONAL} parts of expressions that may be left "
            f"out (with ?, * and the like), not {count}"
        )


def _find_expressions(written: str) -> set[str]:
    """Return the expressions of a grammar of calls; our own rules are no row of such parts."""
    found = set[str]()
    for expression, schema in _EXPRESSION.findall(written):
        found.update([expression], _find_patterns(json.loads(schema or "{}")))
    return found


def _find_patterns(schema: object) -> Iterator[str]:
    """Yield the expressions of a schema, and keys that may be some."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            elif key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _find_patterns(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _find_patterns(item)


def json_rule(schema: str, space: str | None = SPACE) -> str:
    """Return the right side of a Lark rule: JSON that a schema allows. space: None for nothing.

    Objects get no properties but those that the schema names, unless it speaks of others.
    """
    found = json.loads(schema)
    if isinstance(found, bool):
        found = {} if found else {"not": {}}
    if found.get("$ref") == "#":  # a root that is as it is: this says nothing more
        del found["$ref"]
    found = _tidy(found, close=not _mixes(found))
    shape: dict[str, Any] = {"whitespace_flexible": False}
    if space is not None:
        shape = {"whitespace_pattern": space}
    # of a schema's own "x-guidance", which may ask for less than it says, nothing is left
    return "%json " + json.dumps({**found, "x-guidance": shape}, ensure_ascii=False)


def _mixes(schema: object) -> bool:
    """Tell whether schemas are laid over each other somewhere: closed ones may leave nothing."""
    if isinstance(schema, list):
        return any(map(_mixes, schema))
    if not isinstance(schema, dict):
        return False
    over = len(schema.keys() & OVERLAYS) + ("properties" in schema)
    return "allOf" in schema or over > 1 or any(map(_mixes, schema.values()))


def _tidy(schema: Any, *, close: bool) -> Any:
    """Return a schema without what asks for nothing.

    close: objects take no properties that it does not name.
    """
    if isinstance(schema, list):
        return [_tidy(item, close=close) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: _tidy_below(key, value, close=close)
        for key, value in schema.items()
        if key != "uniqueItems" or value is not False
    }
    named = found.get("properties")
    if not close or not isinstance(named, dict) or found.keys() & OPENS:
        return found
    wanted = found.get("required", [])
    if not isinstance(wanted, list) or not all(name in named for name in wanted):
        return found
    return {**found, "additionalProperties": False}


def _tidy_below(key: str, value: Any, *, close: bool) -> Any:
    """Tidy the schemas under a keyword."""
    if key in NAMED and isinstance(value, dict):
        return {name: _tidy(one, close=close) for name, one in value.items()}
    return _tidy(value, close=close) if key in BELOW else value


def quote(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _write(form: StructuredOutputs) -> str:
    """Return the grammar of a form, with the one around it where there is one."""
    inner = _write_inner(form)
    if not form.around:
        return inner
    return json.dumps(
        {"grammars": [{"lark_grammar": form.around}, {"name": ANSWER, "lark_grammar": inner}]},
        ensure_ascii=False,
    )


def _write_inner(form: StructuredOutputs) -> str:
    if form.written:
        return form.written
    if form.choice is not None:
        return "start: CHOICE\nCHOICE: " + " | ".join(map(quote, form.choice))
    if form.regex is not None:
        return f"start: /{_slashed(form.regex)}/"
    if form.grammar is not None:
        return _lark(form.grammar)
    space = None if form.disable_any_whitespace else form.whitespace_pattern or SPACE
    return "start: " + json_rule(form.json or '{"type": "object"}', space)


def _slashed(regex: str) -> str:
    """Return an expression as it stands between slashes."""
    import llguidance  # noqa: PLC0415

    try:
        return llguidance.regex_to_lark(regex)
    except ValueError as error:
        raise RequestError(f"the regex is wrong: {error}") from None


def _lark(grammar: str) -> str:
    """Return Lark, of GBNF too."""
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the library raises what comes
        raise RequestError(f"the grammar is neither Lark nor GBNF: {error}") from None


def shorten(said: str) -> str:
    """Return what llguidance says of an error, in a line."""
    return _PLACE.sub("", said).strip().partition("\n")[0][:300]


def explain(said: str, form: StructuredOutputs) -> str:
    """Return why a form cannot be followed, in words that name what is wrong."""
    said = shorten(said)
    if found := _UNKNOWN.search(said):
        keys = found[1].replace('"', "")
        return f"the schema has keywords that are not supported: {keys}; leave them out"
    if "oneOf constraints" in said:
        return (
            "the schema has `oneOf` with alternatives that may both hold, which is not supported; "
            "make them differ in a required property or in their type, or use `anyOf`"
        )
    if "max is" in said and "items" in said:
        return "the structured output has too many alternatives or properties in one place"
    what = "schema" if form.json else "structured output"
    if said == "NoExtensionBias":
        return f"the {what} lets no answer through, or refers to itself alone"
    return f"the {what} cannot be followed: {said}"
