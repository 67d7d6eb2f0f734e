"""Kept choices of products: whole, the first one's, and never in the way of a load."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dovetail.runtime.accel.generated import Key, choices_path, keep_choices, read_choices

FIRST: set[Key] = {((64, 32, "f32"), 1), ((64, 32, "f32"), 8)}
SECOND: set[Key] = {((64, 32, "f32"), 2)}


def test_what_differs_among_the_compared_has_its_own_file(tmp_path: Path) -> None:
    paths = {choices_path(tmp_path, gpu, plans) for gpu in ("H100", "A10G") for plans in (1, 2)}
    assert len(paths) == 4 and all(path.parent == tmp_path for path in paths)
    assert choices_path(tmp_path, "H100", 1) in paths


def test_a_load_that_chose_meanwhile_takes_what_was_kept_before(tmp_path: Path) -> None:
    path = choices_path(tmp_path, "H100")
    assert read_choices(path) is None
    assert keep_choices(path, FIRST) == FIRST
    assert keep_choices(path, SECOND) == FIRST == read_choices(path)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("damaged", [b"", b"[[[64,32],", b"{}", b"\xff", b"[" * 100_000])
def test_a_damaged_choice_is_told_of_and_replaced(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = choices_path(tmp_path, "H100")
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "dovetail"):
        assert read_choices(path) is None
    assert "compared again" in caplog.text
    assert keep_choices(path, FIRST) == FIRST == read_choices(path)
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_takes_nothing_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = choices_path(tmp_path / "gone", "H100")
    with caplog.at_level(logging.WARNING, "dovetail"):
        assert keep_choices(path, FIRST) == FIRST
    assert "could not be kept" in caplog.text
