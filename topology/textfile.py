"""Bounded reads of the small text files of `/sys` and `/proc`, and parsers of their number formats.

A missing or unreadable file is None (containers hide many); a malformed one is a SpecError.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dovetail.ir.errors import SpecError

SMALL_BYTES = 1 << 20
MAX_ID = 1 << 20
MAX_DIGITS = 19
"""The longest numbers that kernels write: bytes without a limit."""

_UNITS = {"K": 10, "M": 20, "G": 30}


def read_text(path: Path, *, limit: int = SMALL_BYTES) -> str | None:
    """Return the text of `path`, at most `limit` bytes; None where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def read_integer(path: Path, *, default: int) -> int:
    """Return the integer in `path`, `default` where there is no file; SpecError on other text."""
    text = read_text(path)
    if text is None or not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"{path} should hold a number, not {text.strip()[:40]!r}") from None


def parse_number(text: str) -> int | None:
    """Return the number that `text` writes in up to MAX_DIGITS digits, None for others."""
    plain = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    return int(text) if plain else None


def parse_id_list(text: str, path: Path | str) -> tuple[int, ...]:
    """Return the sorted ids of a kernel list such as `0-3,8,10-11`; SpecError where it is none."""
    ids: set[int] = set()
    total = 0
    for part in text.strip().split(","):
        if not part.strip():
            continue
        first, dash, last = part.strip().partition("-")
        low, high = parse_number(first), parse_number(last if dash else first)
        if low is None or high is None:
            raise SpecError(f"{path} should hold a list such as 0-3,8, not {text.strip()[:40]!r}")
        total += max(0, high - low) + 1
        if not low <= high <= MAX_ID or total > MAX_ID:
            raise SpecError(f"{path} holds the impossible range {part.strip()[:40]}")
        ids.update(range(low, high + 1))
    return tuple(sorted(ids))


def show_ids(ids: Iterable[int]) -> str:
    """Return ids as the kernel lists them: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def read_id_list(path: Path) -> tuple[int, ...]:
    """Return the ids of the list in `path`, none where it cannot be read; SpecError on nonsense."""
    return parse_id_list(read_text(path) or "", path)


def parse_size(text: str, path: Path | str) -> int:
    """Return the bytes of a size such as `32K` or `2M`; SpecError where it is none."""
    digits = text.strip().rstrip("KMG")
    unit = text.strip()[len(digits) :]
    number = parse_number(digits)
    if number is None or len(unit) > 1:
        raise SpecError(f"{path} should hold a size such as 32K, not {text.strip()[:40]!r}")
    return number << _UNITS.get(unit, 0)
