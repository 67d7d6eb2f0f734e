from __future__ import annotations

import pytest

from dovetail.tiny_world.scoring import exact_match


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [("Unknown", "unknown", True), ("The Melkar Song", "melkar song.", True), ("A", "B", False)],
)
def test_exact_match(said: str, wanted: str, same: bool) -> None:
    assert exact_match(said, wanted) is same
