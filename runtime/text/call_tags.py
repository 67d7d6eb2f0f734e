"""Arguments of calls that stand each between tags, turned into JSON as they come.

In: the letters behind a call's name, `<parameter=city>Paris</parameter></function>` in the tags of
a format. Out: their JSON, its values typed by the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from dovetail.runtime.text.call_formats import CallFormat
from dovetail.runtime.text.call_reader import DONE, FAILED, SPACE, Reader
from dovetail.runtime.text.call_values import TEXT, read_value
from dovetail.runtime.text.tokenizer import longest_start
from dovetail.runtime.text.tool_schema import Kinds

BETWEEN, VALUE = 2, 3


class TagReader(Reader):
    """Arguments under way. `done`, `failed`, `name`, `take` and `read` as of a CallReader.

    The call is one once its first argument begins, or it ends.
    """

    def __init__(self, form: CallFormat, name: str, kinds: Mapping[str, Kinds]) -> None:
        """`kinds`: what the arguments may be, of those that are known."""
        self.name: str | None = None
        self._form, self._said, self._kinds = form, name, kinds
        self._closes = tuple(filter(None, (form.close.strip(), form.end)))
        self._mark = form.valued.strip()
        self._padded = form.valued.startswith("\n")  # whether a value stands in lines of its own
        self._phase, self._out, self._held = BETWEEN, "", ""
        self._kind: Kinds = frozenset()
        self._first = True  # whether no argument, or no letter of a value, has come
        self._empty = True

    def take(self) -> str:
        """Return what has come of their JSON since the last time."""
        found, self._out = self._out, ""
        return found

    def read(self, letter: str) -> None:
        """Read a letter."""
        self._held += letter
        if self._phase == VALUE:
            self._read_value()
        elif self._phase == BETWEEN:
            self._read_between()

    def _read_between(self) -> None:
        held = self._held.lstrip(SPACE)
        if (found := self._form.argument.find(held)) is not None:
            self._out += ("{" if self._empty else ", ") + f"{_quote(found[0])}: "
            self._kind = self._kinds.get(found[0]) or self._kinds.get("") or frozenset()
            self._out += '"' if self._kind == TEXT else ""
            self.name, self._empty, self._first = self._said, False, True
            self._held, self._phase = "", VALUE
        elif held in self._closes:
            self._out += "{}" if self._empty else "}"
            self.name, self._phase = self._said, DONE
        elif not self._form.argument.may_come(held) and not any(
            close.startswith(held) for close in self._closes
        ):
            self._phase = FAILED

    def _read_value(self) -> None:
        """Read a value: a text goes on at once, of all else the type is seen when it is whole."""
        if self._first and self._padded and self._held == "\n":
            self._held, self._first = "", False
            return
        self._first = False
        ended = self._held.endswith(self._mark)
        if ended and self._kind != TEXT and _in_quotes(self._held[: -len(self._mark)]):
            return
        if not ended and self._kind != TEXT:
            return
        keep = len(self._mark) if ended else longest_start(self._held, self._ends)
        value, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        if ended:
            value = value.removesuffix("\n") if self._padded else value
            self._phase, self._held = BETWEEN, ""
        if self._kind == TEXT:
            self._out += _quote(value)[1:-1] + '"' * ended
        else:
            self._out += read_value(value, self._kind)

    @property
    def _ends(self) -> tuple[str, ...]:
        """What ends a value, with the line's end that goes before it where there is one."""
        return (self._mark, "\n" + self._mark) if self._padded else (self._mark,)


def _in_quotes(value: str) -> bool:
    """Tell whether an array or object of JSON ends within a text, which may hold any mark."""
    quotes = re.sub(r"\\.", "", value, flags=re.DOTALL).count('"')
    return value.lstrip(SPACE)[:1] in ("[", "{") and quotes % 2 == 1


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
