"""Generated text is remembered by its request and its generator, and never at a risk."""

from pathlib import Path

import msgspec

from dovetail.codegen import text_cache
from dovetail.codegen.text_cache import generator_digest, remember_text


class Text(msgspec.Struct):
    source: str


def remember(request, cache: Path, generate) -> Text:
    return remember_text(request, cache, Text, generate)


def counted(text, calls):
    def generate():
        calls.append(text)
        return Text(text)

    return generate


def test_equal_requests_are_generated_once(tmp_path):
    calls = []
    for request in (["a", 1], ["a", 1], ["a", 2]):
        assert remember(request, tmp_path, counted("x", calls)).source == "x"
    assert len(calls) == 2
    assert len([*(tmp_path / "text").iterdir()]) == 2


def test_another_generator_generates_anew(tmp_path, monkeypatch):
    calls = []
    remember("a", tmp_path, counted("old", calls))
    monkeypatch.setattr(text_cache, "generator_digest", lambda: "other")
    assert remember("a", tmp_path, counted("new", calls)).source == "new"


def test_a_damaged_entry_is_made_anew(tmp_path):
    remember("a", tmp_path, counted("x", []))
    (entry,) = (tmp_path / "text").iterdir()
    entry.write_bytes(b'{"source": 3')
    assert remember("a", tmp_path, counted("y", [])).source == "y"
    assert remember("a", tmp_path, counted("z", [])).source == "y"


def test_a_cache_that_cannot_be_written_is_done_without():
    calls = []
    for _ in range(2):
        assert remember("a", Path("/proc/none"), counted("x", calls)).source == "x"
    assert len(calls) == 2


def test_the_digest_covers_kernels_and_templates(tmp_path):
    assert len(generator_digest()) == 64
