"""Files of others with anything in them: each is read, or refused in one sentence of ours."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cli.kernel import check_kernels
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.write.corpus import read_corpus
from dovetail.errors import DovetailError, SpecError, SyntaxDiagnostic
from dovetail.ir.diagnostics import Source
from dovetail.ir.tuning import encode_record
from dovetail.runtime.index.documents import encode_passages
from tests.compiler.records import make_record

KERNELS = sorted((Path(__file__).parent / "ir/low/kernels").glob("*.c"))
ODD = [0, -1, 1 << 63, 1 << 70, 10**400, 1e308, -0.0, True, None, "", "\ud800", "é", [], {}, [[]]]
CORPUS = b'{"_id": 7, "contents": "seven", "title": "S", "year": 1990, "metadata": {"a": ["x"]}}\n'
PIECES = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\u", b"\\ud800", b"\xff", b"\x00", b"1e999"]
PIECES += [b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"\xe2\x80\xa8", b"null", b"-", b"\n", b"\r"]
WORDS = [
    "(",
    ")",
    "{",
    "}",
    "[",
    "]",
    ";",
    ",",
    "*",
    "&",
    "=",
    "+",
    "#",
    "\\",
    "\n",
    '"',
    "'",
    "//",
]
WORDS += ["/*", "float", "int64_t", "void", "for", "if", "else", "return", "struct", "typedef"]
WORDS += ["#define A", "#define F(x) x F(x)", "#if", "#endif", "#else", "F(", "A", "0x", "1e", "->"]
WORDS += [
    "goto",
    "static",
    "const",
    "sizeof",
    "_mm256_setzero_ps()",
    "__m256",
    "\x00",
    "é",
    "?",
    ":",
]


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, len(data))
        cut = chance.choice((0, 0, 1, chance.randint(0, 30)))
        data = data[:at] + chance.choice((b"", *PIECES, CORPUS)) + data[at + cut :]
    return data


def mutate_text(text: str, chance: random.Random) -> str:
    words = text.split(" ")
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(words) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            del words[at : at + chance.randint(1, 8)]
        elif kind == 1:
            words.insert(at, chance.choice(WORDS) * chance.choice((1, 1, 1, 400)))
        elif kind == 2:
            words[at:at] = words[at : at + chance.randint(1, 30)]
        else:
            start = chance.randrange(len(words) + 1)
            words[at : at + 1] = words[start : start + 3]
    return " ".join(words)


def change_one(value: object, chance: random.Random) -> object:
    """Return JSON with one value in it exchanged, or left out."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        if chance.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        return value | {key: change_one(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], change_one(value[at], chance), *value[at + 1 :]]
    if isinstance(value, str) and chance.random() < 0.5:
        return chance.choice(
            (value[:-1], value[1:], value + "x", "2026-01-01T00:00:00", value * 90)
        )
    return chance.choice(ODD)


def read_as_corpus(folder: Path, chance: random.Random) -> None:
    file = folder / chance.choice(("a.jsonl", "a.json"))
    file.write_bytes(mutate_bytes(CORPUS * chance.randint(1, 3), chance))
    try:
        encode_passages(read_corpus(file))
    except SpecError as error:
        assert len(str(error).splitlines()) == 1, error


def read_as_records(folder: Path, chance: random.Random) -> None:
    path, lines = folder / "tuning.jsonl", []
    for _ in range(3):
        record = json.loads(encode_record(make_record()))
        del record["crc"]
        body = json.dumps(change_one(record, chance)).encode()[:-1]
        lines.append(body + b',"crc":"%08x"}\n' % zlib.crc32(body))
    path.write_bytes(b"".join(lines))
    try:
        database = TuningDatabase(path)
    except SpecError as error:  # no line begins as records do
        assert len(str(error).splitlines()) == 1, error
        return
    database.trusted()
    for record in database.records():
        database.lookup(record.key)
    assert database.warning is None or len(database.warning.splitlines()) == 1


def read_as_kernel(_folder: Path, chance: random.Random) -> None:
    file = chance.choice(KERNELS)
    text = mutate_text(file.read_text()[:6000], chance)
    try:
        check_kernels(Source(file.name, text), None, None)
    except SyntaxDiagnostic as error:
        assert 0 < len(error.diagnostics) <= 100
    except DovetailError as error:
        assert len(str(error).splitlines()) == 1, error


READERS: dict[str, Callable[[Path, random.Random], None]] = {
    "corpus": read_as_corpus,
    "tuning database": read_as_records,
    "C text": read_as_kernel,
}


@pytest.mark.parametrize("what", READERS)
def test_changed_files_are_read_or_refused(what: str, tmp_path: Path) -> None:
    for seed in range(60):
        READERS[what](tmp_path, random.Random(seed))


@pytest.mark.long
@pytest.mark.parametrize("what", READERS)
def test_many_changed_files_are_read_or_refused(what: str, tmp_path: Path) -> None:
    for _ in range(10_000 if what != "C text" else 3000):
        seed = random.randrange(1 << 32)
        try:
            READERS[what](tmp_path, random.Random(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@settings(max_examples=100)
@given(
    data=st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode(errors="ignore"))
)
def test_anything_is_a_corpus_or_refused(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for name in ("a.jsonl", "a.json", "a.md"):
        (folder / name).write_bytes(data)
        try:
            encode_passages(read_corpus(folder / name))
        except SpecError as error:
            assert len(str(error).splitlines()) == 1


@settings(max_examples=100)
@given(text=st.text(max_size=80) | st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join))
def test_anything_is_a_kernel_or_has_faults(text: str) -> None:
    for name in ("a.c", "a.dk"):
        try:
            check_kernels(Source(name, text), None, None)
        except DovetailError as error:
            assert str(error)
