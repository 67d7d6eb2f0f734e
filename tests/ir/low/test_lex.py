"""The generated parser: its tables are kept, and made again where what was kept is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.ir.low.lex import grammar


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    grammar.cache_clear()
    yield
    grammar.cache_clear()


def parsed() -> str:
    grammar.cache_clear()
    return grammar().parse("a + b * c", start="expression").pretty()


def test_tables_are_kept_and_damaged_ones_are_made_again(tmp_path: Path) -> None:
    wanted = parsed()
    (kept,) = (tmp_path / "grammar").iterdir()
    whole = kept.read_bytes()
    assert parsed() == wanted
    kept.write_bytes(whole[:1000])
    assert parsed() == wanted and len(kept.read_bytes()) > 1000


def test_without_a_folder_to_keep_them_in_there_is_a_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "file"))
    assert parsed()
