"""TablePredictor: exact at rows, inside the hull between, held outside; profiles are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import ArtifactError
from dovetail.ir.profile import CostRow, ProfileFile, ProfileKey
from dovetail.runtime.schedule.cost_tables import (
    AXES,
    PROFILE,
    Curve,
    Surface,
    TablePredictor,
    keep_profile,
    kept_profiles,
    profile_folder,
    read_profile,
)

KEY = ProfileKey(model="m", device="cpu", threads=2, tensor_parallel=1, kernels="k")
SECONDS = st.floats(0, 10, allow_nan=False)


def row(*at: int, seconds: float) -> CostRow:
    return CostRow(at=at, seconds=seconds, origin="measured", spread=0.01)


def profile(**tables: list[CostRow]) -> ProfileFile:
    return ProfileFile(key=KEY, created="", tables={k: tuple(v) for k, v in tables.items()})


@given(st.dictionaries(st.integers(1, 10**6), SECONDS, min_size=1, max_size=12), st.data())
def test_a_curve_is_exact_at_points_and_between_its_neighbours_elsewhere(
    points: dict[int, float], data: st.DataObject
) -> None:
    curve, known = Curve(sorted(points.items())), sorted(points)
    for x in known:
        assert curve.at(x) == pytest.approx(points[x], abs=1e-12)
    x = data.draw(st.integers(0, 2 * 10**6))
    value = curve.at(x)
    left = max((k for k in known if k <= x), default=known[0])
    right = min((k for k in known if k >= x), default=known[-1])
    low, high = sorted((points[left], points[right]))
    assert low - 1e-9 <= value <= high + 1e-9


@given(
    st.lists(SECONDS, min_size=3, max_size=3),
    st.integers(1, 64),
    st.integers(1, 64 * 1000),
)
def test_a_plane_over_sequences_and_tokens_is_reproduced(
    plane: list[float], sequences: int, tokens: int
) -> None:
    def cost(s: int, n: int) -> float:
        return plane[0] + plane[1] * s + plane[2] * n

    surface = Surface([(s, s * n, cost(s, s * n)) for s in (1, 4, 64) for n in (1, 30, 1000)])
    tokens = max(sequences, min(tokens, sequences * 1000))
    assert surface.at(sequences, tokens) == pytest.approx(cost(sequences, tokens), rel=1e-9)


def test_rows_of_a_surface_may_have_points_of_their_own() -> None:
    surface = Surface([(1, 8, 1.0), (1, 64, 2.0), (2, 16, 3.0)])
    assert surface.at(1, 64) == 2.0
    assert surface.at(2, 16) == 3.0
    assert surface.at(2, 128) == 3.0  # one row has the point, the other ends before
    assert surface.at(9, 72) == 3.0


def test_the_predictor_asks_the_table_of_each_part() -> None:
    found = TablePredictor(
        profile(
            linear=[row(1, seconds=1.0), row(9, seconds=9.0)],
            prefill=[row(4, seconds=2.0), row(8, seconds=6.0)],
            gpu_decode=[row(10, seconds=0.5)],
            cpu_decode=[row(1, 16, seconds=3.0), row(1, 32, seconds=5.0)],
            swap=[row(100, seconds=7.0)],
            launch=[row(seconds=0.125)],
        )
    )
    assert found.linear(5) == 5.0
    assert found.linear(10) == found.linear(1000)
    assert found.prefill([4, 6]) == 6.0
    assert found.gpu_decode(10) == 0.5
    assert found.cpu_decode(1, 24) == 4.0
    assert found.swap(100) == 7.0
    assert found.launch() == 0.125


def test_nothing_takes_no_time() -> None:
    found = TablePredictor(profile(linear=[row(1, seconds=1.0)]))
    for nothing in (found.linear(0), found.prefill([]), found.cpu_decode(0, 0), found.swap(0)):
        assert nothing == 0.0
    assert found.gpu_decode(1) == 0.0  # no such table


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"linaer": [row(1, seconds=1.0)]}, "no table is called"),
        ({"linear": []}, "is empty"),
        ({"linear": [row(1, seconds=1.0), row(1, seconds=2.0)]}, "repeat"),
        ({"linear": [row(0, seconds=1.0)]}, "positive"),
        ({"linear": [row(1, seconds=-1.0)]}, "negative"),
        ({"cpu_decode": [row(1, seconds=1.0)]}, "2 positive coordinates"),
        ({"cpu_decode": [row(8, 4, seconds=1.0)]}, "2 positive coordinates"),
    ],
)
def test_tables_that_make_no_sense_are_refused(tables: dict[str, list[CostRow]], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        TablePredictor(profile(**tables))


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = profile(linear=[row(1, seconds=1.0)], cpu_decode=[row(2, 32, seconds=0.5)])
    assert read_profile(tmp_path, KEY) is None
    keep_profile(tmp_path, written)
    assert read_profile(tmp_path, KEY) == written
    assert [p.name for p in tmp_path.iterdir()] == [PROFILE]


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "n"), ("device", "gpu"), ("threads", 3), ("tensor_parallel", 2), ("kernels", "x")],
)
def test_a_profile_of_something_else_is_refused(
    tmp_path: Path, field: str, value: str | int
) -> None:
    keep_profile(tmp_path, profile(linear=[row(1, seconds=1.0)]))
    with pytest.raises(ArtifactError, match=rf"{field} .* is used; delete the file"):
        read_profile(tmp_path, msgspec.structs.replace(KEY, **{field: value}))


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b"[" * 100000])
def test_a_damaged_profile_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / PROFILE).write_bytes(text)
    with pytest.raises(ArtifactError, match="cannot be decoded"):
        read_profile(tmp_path, KEY)


def test_damaged_profiles_of_devices_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    kept, damaged = profile(linear=[row(1, seconds=1.0)]), (b"[1]", b'{"key": {"model": "\xff"}}')
    keep_profile(profile_folder(KEY), kept)
    for number, text in enumerate(damaged):
        folder = tmp_path / "profiles" / str(number)
        folder.mkdir()
        (folder / PROFILE).write_bytes(text)
    assert kept_profiles("m") == (kept,) and kept_profiles("another") == ()


def test_a_profile_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    later = msgspec.structs.replace(profile(linear=[row(1, seconds=1.0)]), schema=2)
    keep_profile(tmp_path, later)
    with pytest.raises(ArtifactError, match="schema 2"):
        read_profile(tmp_path, KEY)


def test_every_table_has_a_place_in_the_predictor() -> None:
    for name in AXES:
        assert hasattr(TablePredictor, name)
