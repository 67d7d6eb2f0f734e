"""Typed, bounded reading of JSON files that others wrote (config.json and its like).

In: a path. Out: a `Config` whose getters return checked values; every fault is a SpecError that
names the file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dovetail.ir.errors import SpecError

MAX_JSON_BYTES = 16 << 20
Family = TypeVar("Family")


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a file of at most `limit` bytes.

    Raises SpecError when it is missing, unreadable, not a regular file or too large.
    """
    try:
        if not path.is_file():
            raise SpecError(f"{path} is missing; a complete Hugging Face model directory has it")
        size = path.stat().st_size
        if size > limit:
            raise SpecError(f"{path} has {size} bytes, more than the {limit} allowed for this file")
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error


def parse_json(data: bytes | str, name: str) -> Any:
    """Return the JSON value in `data`. Raises SpecError naming `name` for anything else."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{name} is not valid JSON: {error}") from error


def parse_json_object(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises SpecError naming `name` for anything else."""
    value = parse_json(data, name)
    if not isinstance(value, dict):
        raise SpecError(f"{name} must hold a JSON object, not {_kind(value)}")
    return value


@dataclass(frozen=True, slots=True)
class Config:
    """One JSON object and the name it goes by in messages. A value of null counts as absent.

    aliases: what the file may call a key instead.
    """

    name: str
    values: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Config:
        """Read a JSON file of at most 16 MiB."""
        return cls(str(path), parse_json_object(read_bounded(path, MAX_JSON_BYTES), str(path)))

    def has(self, key: str) -> bool:
        """Tell whether `key` is there and not null."""
        return self.values.get(self._named(key)) is not None

    def fail(self, key: str, message: str) -> SpecError:
        """Return the error for a wrong value of `key`."""
        key = self._named(key)
        return SpecError(f"{self.name}: {key} is {_shown(self.values.get(key))}, {message}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in [low, high]; whole floats count as integers."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "but an integer is needed")
        if not low <= value <= high:
            raise self.fail(key, f"but must be between {low} and {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "but a number is needed")
        if not low <= value <= high:  # nor is what is no number at all
            raise self.fail(key, f"but must be a number between {low:g} and {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "but must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "but a string is needed")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; absent counts as empty."""
        value = self._get(key, [])
        if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "but must be a list of strings")
        return tuple(value)

    def section(self, key: str) -> Config:
        """Return a nested object."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.fail(key, "but must be an object")
        return Config(f"{self.name}: {key}", value)

    def architecture(
        self, known: Mapping[str, Family], what: str, encoders: Collection[str] = ()
    ) -> tuple[str, Family]:
        """Return the first of `architectures` that is known, and its family.

        encoders: architectures that SpecError names, too, for another one.
        """
        names = self.texts("architectures")
        for name in names:
            if name in known:
                return name, known[name]
        raise SpecError(
            f"{self.name}: architecture {', '.join(names) or '(none)'} is not {what}; "
            f"supported: {', '.join(known)}"
            f"{'; as encoders: ' if encoders else ''}{', '.join(encoders)}"
        )

    def _named(self, key: str) -> str:
        alias = self.aliases.get(key, key)
        return key if self.values.get(alias) is None else alias

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self._named(key))
        if value is not None:
            return value
        if default is None:
            raise SpecError(f"{self.name} has no {key}, which is needed")
        return default


def _shown(value: object) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
