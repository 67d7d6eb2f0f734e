"""Remembers what compiles found out by measuring, so that the next one like it measures nothing.

In: a machine, and a question with all that its answer depends on. Out: the answer an earlier
compile gave, from `<build cache>/answers`; questions count as equal only under equal source files.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import dovetail.codegen
import dovetail.compiler
import dovetail.ir
import dovetail.runtime
import dovetail.topology
from dovetail.codegen.library import ABI
from dovetail.codegen.text_cache import digest_sources
from dovetail.codegen.toolchain import content_key
from dovetail.compiler.measure.recorder import hardware_key
from dovetail.ir.cache import cache_directory
from dovetail.ir.files import write_whole
from dovetail.ir.tuning import HardwareKey
from dovetail.topology.hardware import HardwareSpec

PACKAGES = (dovetail.codegen, dovetail.compiler, dovetail.ir, dovetail.runtime, dovetail.topology)
"""Whose sources a compile, and what it measures, depend on."""
A = TypeVar("A", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Memory:
    """Answers that hold on one machine with these allowed PUs and this CPU quota."""

    folder: Path
    machine: tuple[HardwareKey, tuple[int, ...], float | None]

    @classmethod
    def of(cls, hardware: HardwareSpec, cache: Path | None = None) -> Memory:
        """Return the memory of a machine in a build cache."""
        key = hardware_key(hardware, hardware.usable_threads, ABI)
        machine = (key, hardware.allowed_pus, hardware.cpu_quota)
        return cls((cache or cache_directory()) / "answers", machine)

    def recall(self, question: Any, kind: type[A]) -> A | None:
        """Return the answer to a JSON-like question; None where there is none, or a damaged one."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
            return msgspec.json.decode(self._file(question, kind).read_bytes(), type=kind)
        return None

    def remember(self, question: Any, answer: msgspec.Struct) -> None:
        """Keep an answer; a cache that cannot be written is as good as an empty one."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(question, type(answer)), msgspec.json.encode(answer))

    def _file(self, question: Any, kind: type[msgspec.Struct]) -> Path:
        asked = [digest_sources(*PACKAGES), self.machine, kind.__name__, question]
        return self.folder / f"{content_key(msgspec.to_builtins(asked, str_keys=True))}.json"


def spell_time(when: datetime) -> str:
    """Return a time as notes have it."""
    return f"{when:%Y-%m-%d %H:%M %Z}"
