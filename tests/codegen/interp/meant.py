"""What an instruction of the tables does, where these say only how it is called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dovetail.codegen.isa.intrinsics import Meaning


class Meant(NamedTuple):
    """The name of an instruction, its numpy meaning, and the immediates to try."""

    name: str
    meaning: Meaning
    immediates: tuple[int, ...] = ()


def meant(name: str, meaning: Meaning, *, immediates: Iterable[int] = ()) -> Meant:
    return Meant(name, meaning, tuple(immediates))
