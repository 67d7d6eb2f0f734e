"""Reads a corpus: JSON lines, JSON, CSV, Markdown or plain text, or folders of them -> passages.

In: a path. Out: `Passage`s in order, each with a key of its own. A line of JSON, or a row of CSV,
is a passage as it is; Markdown and text are cut at headings and blank lines into passages of a
bounded length.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dovetail.compiler.write.writer import BUILDING, MANIFEST, kind_of
from dovetail.ir.errors import SpecError
from dovetail.ir.index_file import Passage

TEXT_FIELDS = ("text", "contents", "content", "passage")
KEY_FIELDS = ("key", "id", "_id", "docid")
PASSAGE_WORDS = 200
"""Words of a passage at most, where a text has to be cut: what common encoders take whole."""
_HIDDEN = re.compile(rf"\.|.*{re.escape(BUILDING)}(\.lock)?$")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*")
_FENCE = re.compile(r"\s*(?:(`{3,})[^`]*|(~{3,}).*)")
"""What begins code; behind it may stand its language, but no other tick: then it is words."""


def read_corpus(path: str | Path, words: int = PASSAGE_WORDS) -> list[Passage]:
    """Return the passages of a file, or of all files of a folder in the order of their names.

    Args:
        path: a file of READERS, also with .gz, or a folder of them: see `visible_files`.
        words: of a passage of Markdown or text at most.

    Raises:
        SpecError: there is nothing to read, or a file is not what its name says.
    """
    root = Path(path)
    if not root.exists():
        raise SpecError(f"{root} does not exist; give a corpus: a file or a folder")
    files = [root] if root.is_file() else sorted(f for f in visible_files(root) if _kind(f))
    found: list[Passage] = []
    keys: set[str] = set()
    for file in files:
        reader = READERS.get(_kind(file))
        if reader is None:
            raise SpecError(f"{file}: unknown file type; name it " + ", ".join(READERS))
        name = _spell(file.name if file == root else file.relative_to(root))
        for number, passage in enumerate(reader(file, _read(file), words)):
            found.append(_with_key(passage, f"{name}:{number}", keys, file))
    if not found:
        raise SpecError(f"{root} holds no passages; give " + ", ".join(READERS) + " with text")
    return found


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, but for hidden ones and those of hidden folders, as of git.

    Nor those of indexes and artifacts: a corpus may have its own index beside it.
    """
    made = {path.parent for path in folder.rglob(MANIFEST) if kind_of(path.parent)}
    for path in folder.rglob("*"):
        hidden = any(map(_HIDDEN.match, path.relative_to(folder).parts))
        if path.is_file() and not hidden and made.isdisjoint(path.parents):
            yield path


def unread_kinds(corpus: Path) -> Counter[str]:
    """Return the endings of the files of a folder that `read_corpus` leaves out, and how many."""
    return Counter(f.suffix or f.name for f in visible_files(corpus) if not _kind(f))


def _spell(path: Path | str) -> str:
    """Return a path as text; what of it is none is written in hexadecimal."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _kind(file: Path) -> str:
    """Return the ending that says how a file is read, empty where none does."""
    suffixes = [s.lower() for s in file.suffixes if s.lower() != ".gz"]
    return suffixes[-1] if suffixes and suffixes[-1] in READERS and file.is_file() else ""


def _read(file: Path) -> str:
    try:
        data = file.read_bytes()
        packed = file.suffix.lower() == ".gz"
        return (gzip.decompress(data) if packed else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SpecError(
            f"{file}: cannot be read as UTF-8 text ({error}); convert it, or take it out"
        ) from None


def _with_key(passage: Passage, default: str, keys: set[str], file: Path) -> Passage:
    """Give a passage without a key one; refuse one that another has."""
    key = passage.key or default
    if key in keys:
        raise SpecError(f"{file}: two passages have the key {key!r}; give each another")
    keys.add(key)
    return msgspec.structs.replace(passage, key=key)


# ---- kinds of files ----


def _read_lines(file: Path, text: str, _words: int) -> Iterator[Passage]:
    for number, line in enumerate(text.split("\n"), 1):  # other separators may stand in texts
        if line.strip():
            yield _read_record(_decode(line, f"{file}:{number}"), f"{file}:{number}")


def _read_json(file: Path, text: str, _words: int) -> Iterator[Passage]:
    """A list of records, or an object of texts (or lists of sentences) by title."""
    content = _decode(text, str(file))
    if isinstance(content, dict):
        if wrong := [title for title, body in content.items() if not _is_body(body)]:
            raise SpecError(
                f"{file}: an object's values must be texts (or lists of sentences) by title, and "
                f"that of {wrong[0]!r} is none; passages with fields of their own stand in a list, "
                '[{"text": "..."}]'
            )
        content = [
            {"title": title, "text": "".join(body) if isinstance(body, list) else body}
            for title, body in content.items()
        ]
    if not isinstance(content, list):
        raise SpecError(f"{file}: must be a list of passages, or an object of texts by title")
    for number, record in enumerate(content, 1):
        yield _read_record(record, f"{file}, passage {number}")


def _read_csv(file: Path, text: str, _words: int) -> Iterator[Passage]:
    """Rows under a row of names; what is between these parts all others, too."""
    names = text.partition("\n")[0]
    parts = max(",;\t", key=names.count)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # the module's own is 128 KiB
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=parts, strict=True)
    try:
        there = rows.fieldnames or TEXT_FIELDS  # an empty file has no passage, as others
        if set(there).isdisjoint(TEXT_FIELDS):
            needed, found = (" or ".join(map(repr, names)) for names in (TEXT_FIELDS, there))
            raise SpecError(f"{file}: its first line must name a column {needed}, not {found}")
        for row in rows:
            record = {name: value for name, value in row.items() if name and value is not None}
            yield _read_record(record, f"{file}:{rows.line_num}")
    except csv.Error as error:
        raise SpecError(f"{file}, behind line {rows.line_num}: is no CSV ({error})") from None


def _is_body(value: object) -> bool:
    sentences = value if isinstance(value, list) else [value]
    return all(isinstance(sentence, str) for sentence in sentences)


def _read_markdown(_file: Path, text: str, words: int) -> Iterator[Passage]:
    """Sections; the title is the way of headings that leads there."""
    way: dict[int, str] = {}
    lines: list[str] = []
    fence = ""

    def section() -> Iterator[Passage]:
        yield from _cut("\n".join(lines), " > ".join(way.values()), words)

    for line in text.splitlines():
        fence = _fence_behind(line, fence)
        heading = None if fence else _HEADING.fullmatch(line.strip())
        if heading is None:
            lines.append(line)
            continue
        yield from section()
        level = len(heading[1])
        way = {at: title for at, title in way.items() if at < level} | {level: heading[2]}
        lines.clear()
    yield from section()


def _fence_behind(line: str, fence: str) -> str:
    """Return the fence of the code that goes on behind a line, "" for none; fence: before it.

    As many of the same sign, or more, and nothing else end it.
    """
    found = _FENCE.fullmatch(line)
    mark = (found[1] or found[2]) if found else ""
    if not fence:
        return mark
    return "" if mark.startswith(fence) and line.strip() == mark else fence


def _read_text(file: Path, text: str, words: int) -> Iterator[Passage]:
    yield from _cut(text, _spell(file.name).split(".")[0], words)


READERS: dict[str, Callable[[Path, str, int], Iterator[Passage]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".txt": _read_text,
}


def _decode(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SpecError(f"{where}: is not JSON ({error})") from None


def _read_record(record: Any, where: str) -> Passage:
    """Return a passage; fields that have no meaning of their own are metadata."""
    if not isinstance(record, dict) or record.keys().isdisjoint(TEXT_FIELDS):
        fields = " or ".join(map(repr, TEXT_FIELDS))
        raise SpecError(f"{where}: must be an object with a field {fields}")
    left = dict(record)
    text = next((left.pop(name) for name in TEXT_FIELDS if name in left), None)
    key = next((left.pop(name) for name in KEY_FIELDS if name in left), None)
    title, metadata = left.pop("title", "") or "", left.pop("metadata", {}) or {}
    if not isinstance(text, str) or not isinstance(title, str) or not isinstance(metadata, dict):
        raise SpecError(
            f"{where}: {TEXT_FIELDS[0]!r} and 'title' must be texts, 'metadata' an object"
        )
    if not text.strip() and not title.strip():
        raise SpecError(f"{where}: has neither text nor title")
    key = "" if key is None else str(key)
    return Passage(key=key, text=text, title=title, metadata=left | metadata)


def _cut(text: str, title: str, words: int) -> Iterator[Passage]:
    """Cut a text at blank lines, and paragraphs that are too long between words."""
    held: list[str] = []
    count = 0
    for piece in _pieces(text, words):
        length = len(piece.split())
        if held and count + length > words:
            yield Passage(key="", text="\n\n".join(held), title=title)
            held, count = [], 0
        held.append(piece)
        count += length
    if held:
        yield Passage(key="", text="\n\n".join(held), title=title)


def _pieces(text: str, words: int) -> Iterator[str]:
    """Yield the paragraphs of a text; of long ones, parts of so many words."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        split = paragraph.split()
        if len(split) <= words:
            yield from [paragraph.strip()] if split else []
        else:
            yield from (" ".join(split[i : i + words]) for i in range(0, len(split), words))
