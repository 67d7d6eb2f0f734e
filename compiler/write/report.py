"""What a compile tells while it runs and when it is done.

In: steps as they begin and end. Out: progress for whoever listens, and a `CompileReport`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import msgspec

from dovetail.compiler.plan.end_to_end import EndToEnd
from dovetail.compiler.search.gain import Gain

Progress = Callable[[str, int, int], None]
"""Called with (step, done, total); the steps' names are those of `STEPS`, in that order."""
STEPS = ("read", "schedules", "kernels", "weights", "write", "plans")


class EncoderReport(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder that lies beside the first model of an artifact."""

    name: str
    family: str
    weight_bytes: int
    weight_dtype: str
    max_tokens: int


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a compile did: `seconds` by step, `rows` of the schedules by where they come from.

    threads: of a decode step, in all processes. plan: both phases' in words. trials: the
    measurements behind the schedules. measured: how many of them were made now; the others come
    from the tuning database. end_to_end: None where nothing was compared. Figures of a model are
    the first one's, of work those of all.
    """

    path: str
    family: str
    weight_bytes: int
    weight_dtype: str
    encoders: tuple[EncoderReport, ...] = ()
    kv_dtype: str
    max_context: int
    targets: tuple[str, ...]
    kernels: int
    threads: int
    plan: str
    workload: str
    effort: str
    rows: dict[str, int]
    trials: int
    measured: int
    gain: Gain | None
    end_to_end: EndToEnd | None = None
    seconds: dict[str, float]
    notes: tuple[str, ...]
    workflows: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()

    def __fspath__(self) -> str:
        """Return the artifact's path, so that `dovetail.load(report)` opens it."""
        return self.path


def our_version() -> str:
    """Return the installed version of Dovetail."""
    try:
        return version("dovetail")
    except PackageNotFoundError:
        return "from source"


@dataclass(slots=True)
class Steps:
    """Times the steps and passes their progress on."""

    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Run one step of STEPS."""
        assert name == STEPS[len(self.seconds)], name
        self.current = name
        self.advance(0, 1)
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        self.advance(1, 1)

    def advance(self, done: int, total: int) -> None:
        """Report progress inside the current step."""
        if self.progress:
            self.progress(self.current, done, total)
