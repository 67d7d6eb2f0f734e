"""Generated text is remembered by its request and its generator, and never at a risk."""

from dovetail.codegen import text_cache
from dovetail.codegen.text_cache import UnitText, generator_digest, remember_text


def counted(text, calls):
    def generate():
        calls.append(text)
        return UnitText(source=text, kernels=())

    return generate


def test_equal_requests_are_generated_once(tmp_path):
    calls = []
    for request in (["a", 1], ["a", 1], ["a", 2]):
        assert remember_text(request, tmp_path, counted("x", calls)).source == "x"
    assert len(calls) == 2
    assert len([*(tmp_path / "text").iterdir()]) == 2


def test_another_generator_generates_anew(tmp_path, monkeypatch):
    calls = []
    remember_text("a", tmp_path, counted("old", calls))
    monkeypatch.setattr(text_cache, "generator_digest", lambda: "other")
    assert remember_text("a", tmp_path, counted("new", calls)).source == "new"


def test_a_damaged_entry_is_made_anew(tmp_path):
    remember_text("a", tmp_path, counted("x", []))
    (entry,) = (tmp_path / "text").iterdir()
    entry.write_bytes(b'{"source": 3')
    assert remember_text("a", tmp_path, counted("y", [])).source == "y"
    assert remember_text("a", tmp_path, counted("z", [])).source == "y"


def test_a_cache_that_cannot_be_written_is_done_without():
    from pathlib import Path

    calls = []
    for _ in range(2):
        assert remember_text("a", Path("/proc/none"), counted("x", calls)).source == "x"
    assert len(calls) == 2


def test_the_digest_covers_kernels_and_templates(tmp_path):
    assert len(generator_digest()) == 64
