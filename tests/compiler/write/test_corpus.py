"""Corpora of every kind, and what is no corpus."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.write.corpus import _cut, read_corpus, unread_kinds
from dovetail.ir.errors import SpecError
from dovetail.runtime.index.documents import encode_passages

MARKDOWN = """before any heading

# Kitchen
one two

## Knives
```
# no heading
```
sharp
# Garden

"""


def test_files_of_a_folder_become_passages_with_keys_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.md").write_text(MARKDOWN)
    (tmp_path / "deep" / "b.txt").write_text("a note")
    (tmp_path / "ignored.pdf").write_bytes(b"%PDF")
    for hidden in (tmp_path / ".git" / "head.txt", tmp_path / "deep" / ".draft.md"):
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text("not to be found")
    lines = '{"_id": 7, "contents": "seven", "title": "S", "year": 1990}\n\n{"text": "eight"}\n'
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "d.json").write_text('{"T": ["one. ", "two."], "U": "three"}')
    (tmp_path / "e.json").write_text('[{"text": "t", "metadata": {"tags": ["x"]}}]')
    found = [(p.key, p.title, p.text, p.metadata) for p in read_corpus(tmp_path)]
    assert found == [
        ("a.md:0", "", "before any heading", {}),
        ("a.md:1", "Kitchen", "one two", {}),
        ("a.md:2", "Kitchen > Knives", "```\n# no heading\n```\nsharp", {}),
        ("7", "S", "seven", {"year": 1990}),
        ("c.jsonl.gz:1", "", "eight", {}),
        ("d.json:0", "T", "one. two.", {}),
        ("d.json:1", "U", "three", {}),
        ("deep/b.txt:0", "b", "a note", {}),
        ("e.json:0", "", "t", {"tags": ["x"]}),
    ]


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("```python", "```"),
        ("```", "`````"),
        ("~~~~ a `b`", "~~~~"),
        ("````\n```", "```\n````"),
        ("```\n~~~", "```"),
        ("```\n```python", "```  "),
    ],
)
def test_headings_stand_outside_of_code(tmp_path: Path, begin: str, end: str) -> None:
    text = f"# A\n```pip install b```\n# B\n{begin}\n# c\n{end}\n# D\nlast"
    (tmp_path / "a.md").write_text(text)
    found = [(p.title, p.text) for p in read_corpus(tmp_path)]
    code = f"{begin}\n# c\n{end}".rstrip()
    assert found == [("A", "```pip install b```"), ("B", code), ("D", "last")]


@pytest.mark.parametrize(("name", "parts"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t")])
def test_rows_of_csv_are_passages(tmp_path: Path, name: str, parts: str) -> None:
    long = "word " * 40_000
    rows = [
        ["id", "text", "lang", "note"],
        ["1", '"two\r\nlines, ""quoted"""', "de"],
        ["", long, "fr", "far"],
        [],
    ]
    text = "\r\n".join(parts.join(row) for row in rows)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [(p.key, p.text, p.metadata) for p in read_corpus(tmp_path)] == [
        ("1", 'two\r\nlines, "quoted"', {"lang": "de"}),
        (f"{name}:1", long, {"lang": "fr", "note": "far"}),
    ]


def test_separators_of_unicode_end_no_line_of_json(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\x85d", "e"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert [p.text for p in read_corpus(tmp_path)] == texts


def test_a_key_of_null_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": null, "text": "a"}\n{"id": null, "text": "b"}')
    (tmp_path / "B.TXT.GZ").write_bytes(gzip.compress(b"packed"))
    assert [p.key for p in read_corpus(tmp_path)] == ["B.TXT.GZ:0", "a.jsonl:0", "a.jsonl:1"]


def test_the_name_of_a_file_may_be_no_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("a note")
    (found,) = read_corpus(tmp_path)
    assert (found.key, found.title) == (r"caf\xe9.txt:0", r"caf\xe9")
    encode_passages([found])


def test_files_that_are_left_out_are_counted_by_their_endings(tmp_path: Path) -> None:
    for name in ("a.md", "b.pdf", "c.pdf", "d.html", ".e.pdf"):
        (tmp_path / name).write_text("text")
    assert unread_kinds(tmp_path) == {".pdf": 2, ".html": 1}
    assert not unread_kinds(tmp_path / "a.md")


@given(
    paragraphs=st.lists(st.lists(st.sampled_from(["a", "bb", "c."]), max_size=30), max_size=8),
    words=st.integers(1, 12),
)
def test_cutting_loses_no_word_and_no_passage_is_too_long(
    paragraphs: list[list[str]], words: int
) -> None:
    passages = list(_cut("\n\n".join(map(" ".join, paragraphs)), "t", words))
    assert [w for p in passages for w in p.text.split()] == [w for p in paragraphs for w in p]
    assert all(1 <= len(p.text.split()) <= words for p in passages)
    both = [len(a.text.split()) + len(b.text.split()) for a, b in pairwise(passages)]
    short = all(len(p) <= words for p in paragraphs)
    assert not short or all(count > words - max(map(len, paragraphs)) for count in both)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", "{", "a.jsonl:1: is not JSON"),
        ("a.jsonl", "[1]", "must be an object"),
        ("a.jsonl", '{"page_content": "x"}', "an object with a field 'text' or 'contents' or"),
        ("a.jsonl", '{"title": 4, "text": "x"}', "must be texts"),
        ("a.jsonl", '{"text": " "}', "neither text nor title"),
        ("a.jsonl", '{"id": 1, "text": "x"}\n{"id": "1", "text": "y"}', "the key '1'"),
        ("a.json", "4", "must be a list"),
        ("a.json", '{"t": 4}', "must be texts"),
        ("a.json", '{"": [1]}', "of '' is none"),
        ("a.json", '{"docs": [{"text": "x"}]}', "of 'docs' is none; .* stand in a list"),
        ("a.json", '{"a": {"text": "x"}}', "of 'a' is none; .* stand in a list"),
        ("a.csv", "a,b\n1,2", "a.csv: its first line must .* not 'a' or 'b'"),
        ("a.csv", 'text\n"open', "a.csv, behind line 1: is no CSV"),
        ("a.csv", "text\n", "holds no passages"),
        ("a.txt", "  \n", "holds no passages"),
        ("a.pdf", "x", "unknown file type"),
        ("a.txt.gz", "no gzip", "cannot be read"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SpecError, match=said):
        read_corpus(tmp_path / name)


def test_no_corpus_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    for path, said in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "latin.txt", "UTF-8"),
    ):
        with pytest.raises(SpecError, match=said):
            read_corpus(path)
    (tmp_path / "latin.txt").unlink()
    with pytest.raises(SpecError, match="holds no passages"):
        read_corpus(tmp_path)
