"""Cost tables of a model on a machine, and the Predictor that interpolates them.

In: a `ProfileFile` (rows that were measured, simulated or assumed). Out: `TablePredictor`, exact at
the rows, linear between them, held at the edge outside.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

import msgspec

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import ArtifactError
from dovetail.ir.files import read_json, write_whole
from dovetail.ir.profile import CostRow, LatencyRow, ProfileFile, ProfileKey


class Predictor:
    """Seconds on this machine for this model; this one is for who weighs no times, and says 0."""

    def look_up(self, table: str, x: float) -> float:
        """Return the seconds at `x` of a table with one coordinate; 0 of nothing."""
        return 0.0

    def linear(self, tokens: int) -> float:
        """All projections of one layer over `tokens` rows."""
        return self.look_up("linear", tokens)

    def prefill(self, lengths: Sequence[int]) -> float:
        """Prefill attention of one layer over prompts of `lengths`: they add up."""
        return sum(self.look_up("prefill", length) for length in lengths)

    def gpu_decode(self, tokens: int) -> float:
        """Accelerator decode attention of one layer over `tokens` stored tokens."""
        return self.look_up("gpu_decode", tokens)

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        """CPU decode attention of one layer over `sequences` with `tokens` stored tokens in all."""
        return 0.0

    def swap(self, nbytes: int) -> float:
        """Move `nbytes` of KV between devices."""
        return self.look_up("swap", nbytes)

    def launch(self) -> float:
        """Fixed cost of starting one layer stage."""
        return 0.0

    def head(self, rows: int) -> float:
        """Logits of `rows` tokens: once a step, not once a layer."""
        return self.look_up("head", rows)


AXES: dict[str, int] = {
    "linear": 1,  # token rows
    "prefill": 1,  # tokens of one prompt
    "gpu_decode": 1,  # tokens stored, of all sequences
    "cpu_decode": 2,  # sequences, tokens stored of all of them
    "swap": 1,  # bytes
    "launch": 0,
    "head": 1,  # rows of logits, once a step
}
"""Tables a profile may have, with the number of their coordinates."""

PROFILE, DEVICE_PROFILES = "profile.json", "profiles"
MAX_BYTES = 16 << 20

log = logging.getLogger("dovetail")


class Curve:
    """Seconds over one coordinate: linear between points, held at the first and last one."""

    __slots__ = ("_slopes", "_x", "_y")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """`points` are (coordinate, seconds), coordinates rising strictly."""
        self._x = [float(x) for x, _ in points]
        self._y = [y for _, y in points]
        pairs = itertools.pairwise(points)
        self._slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs]

    def at(self, x: float) -> float:
        """Return the seconds at `x`."""
        i = bisect_right(self._x, x) - 1
        if 0 <= i < len(self._slopes):
            return self._y[i] + self._slopes[i] * (x - self._x[i])
        return self._y[max(i, 0)]


class Surface:
    """Seconds over (sequences, tokens): bilinear in sequences and tokens of each.

    In these coordinates every count of sequences may have points of its own, and a plane over
    (sequences, tokens) comes out exactly.
    """

    __slots__ = ("_curves", "_sequences")

    def __init__(self, points: Sequence[tuple[int, int, float]]) -> None:
        """`points` are (sequences, tokens, seconds)."""
        rows: dict[int, list[tuple[float, float]]] = {}
        for sequences, tokens, seconds in sorted(points):
            rows.setdefault(sequences, []).append((tokens / sequences, seconds))
        self._sequences = list(rows)
        self._curves = [Curve(row) for row in rows.values()]

    def at(self, sequences: int, tokens: float) -> float:
        """Return the seconds."""
        each = tokens / sequences
        i = bisect_right(self._sequences, sequences) - 1
        low = self._curves[max(i, 0)].at(each)
        if i < 0 or i + 1 == len(self._sequences) or sequences == self._sequences[i]:
            return low
        start, end = self._sequences[i], self._sequences[i + 1]
        high = self._curves[i + 1].at(each)
        return low + (high - low) * (sequences - start) / (end - start)


class TablePredictor(Predictor):
    """Predicts by the tables of a profile; what has no table takes 0 s."""

    def __init__(self, profile: ProfileFile) -> None:
        """Raises ArtifactError where a table is unknown, empty or has bad coordinates."""
        self.profile = profile
        check_tables(profile)
        rows = profile.tables
        self._curves = {
            name: Curve(sorted((row.at[0], row.seconds) for row in rows[name]))
            for name, axes in AXES.items()
            if axes == 1 and name in rows
        }
        points = [(row.at[0], row.at[1], row.seconds) for row in rows.get("cpu_decode", ())]
        self._cpu_decode = Surface(points) if points else None
        self._launch = sum(row.seconds for row in rows.get("launch", ()))  # one, or none

    def look_up(self, table: str, x: float) -> float:
        """See Predictor."""
        curve = self._curves.get(table)
        return curve.at(x) if curve and x > 0 else 0.0

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        """See Predictor."""
        if sequences <= 0 or self._cpu_decode is None:
            return 0.0
        return self._cpu_decode.at(sequences, tokens)

    def launch(self) -> float:
        """See Predictor."""
        return self._launch


def check_tables(profile: ProfileFile, where: str = "the profile") -> None:
    """Raise ArtifactError where a table is unknown, empty, or its rows make no sense."""
    for name, rows in profile.tables.items():
        if name not in AXES:
            raise ArtifactError(f"{where}: no table is called {name!r}; {_ADVICE}")
        if not rows:
            raise ArtifactError(f"{where}: table {name!r} is empty; {_ADVICE}")
        points = {row.at for row in rows}
        if len(points) < len(rows) or not all(_is_sound(row, AXES[name]) for row in rows):
            raise ArtifactError(
                f"{where}: table {name!r} has rows that repeat, have not {AXES[name]} positive "
                f"coordinates, or a negative time; {_ADVICE}"
            )


def _is_sound(row: CostRow, axes: int) -> bool:
    ordered = axes < 2 or (len(row.at) == 2 and row.at[0] <= row.at[1])
    return len(row.at) == axes and all(x > 0 for x in row.at) and ordered and row.seconds >= 0


_ADVICE = "delete the file, and it is measured anew"


def read_profile(folder: Path, key: ProfileKey) -> ProfileFile | None:
    """Return the profile kept in a model's folder of an artifact; None where there is none.

    Raises:
        ArtifactError: it is damaged, or was made for another model, device, number of threads or
            ranks, or other kernels than `key`.
    """
    path = folder / PROFILE
    try:
        profile = read_json(path, ProfileFile, MAX_BYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}; {_ADVICE}") from None
    check_tables(profile, str(path))
    check_key(profile, key, str(path))
    return profile


def check_key(profile: ProfileFile, key: ProfileKey, where: str = "the profile") -> None:
    """Raise ArtifactError naming each part in which a profile's key is not `key`."""
    wrong = [
        f"{name} {getattr(profile.key, name)!r} where {getattr(key, name)!r} is used"
        for name in ProfileKey.__struct_fields__
        if getattr(profile.key, name) != getattr(key, name)
    ]
    if profile.schema != 1:
        wrong.append(f"schema {profile.schema} where this version reads 1")
    if wrong:
        raise ArtifactError(f"{where}: was made for {', '.join(wrong)}; {_ADVICE}")


def profile_folder(key: ProfileKey) -> Path:
    """Return where the cache keeps the profile of a device, as `profile.json`."""
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]
    return cache_directory() / DEVICE_PROFILES / digest


def kept_profiles(model: str) -> tuple[ProfileFile, ...]:
    """Return the profiles of devices that the cache has of the model with this fingerprint."""
    found = []
    for path in sorted((cache_directory() / DEVICE_PROFILES).glob(f"*/{PROFILE}")):
        with suppress(FileNotFoundError, ValueError):  # of no use: measured anew when it is wanted
            profile = read_json(path, ProfileFile, MAX_BYTES)
            found += [profile] if profile.key.model == model else []
    return tuple(found)


def make_profile(
    key: ProfileKey,
    tables: Mapping[str, Iterable[CostRow]],
    latency: tuple[LatencyRow, ...] = (),
) -> ProfileFile:
    """Return a profile that was measured now."""
    return ProfileFile(
        key=key,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tables={name: tuple(sorted(rows, key=attrgetter("at"))) for name, rows in tables.items()},
        latency=latency,
    )


def keep_profile(folder: Path, profile: ProfileFile) -> None:
    """Write a profile, whole or not at all; the log says where a folder takes none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
        write_whole(folder / PROFILE, text)
    except OSError as error:
        log.warning("the profile could not be kept in %s: %s", folder, error.strerror)


def digest_kernels(kernels: Iterable[KernelEntry]) -> str:
    """Return what tells the kernels that were measured from others."""
    lines = sorted(f"{kernel.name} {kernel.digest}" for kernel in kernels)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
