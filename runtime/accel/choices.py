"""Which products of a model a GPU multiplies by generated kernels: what a comparison found, kept.

In: a model's folder of an artifact, and what was compared. Out: the keys of the faster programs. A
choice by time changes bits, so that loads of one artifact on one kind of GPU share theirs.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import msgspec

from dovetail.ir.files import read_json

Shape: TypeAlias = tuple[int, int, str]
"""Columns of C, steps of K, and the format of the weights."""
Key: TypeAlias = tuple[Shape, int]
"""A shape and a number of rows."""
MAX_BYTES = 1 << 20

log = logging.getLogger("dovetail")


def choices_path(folder: Path, *compared: object) -> Path:
    """Return where the choices between such things are: their `repr` makes the name."""
    digest = hashlib.sha256(repr(compared).encode()).hexdigest()
    return folder / f"gpu_products.{digest[:16]}.json"


def read_choices(path: Path) -> set[Key] | None:
    """Return what an earlier load chose; None where none did, or its file is damaged."""
    try:
        return read_json(path, set[Key], MAX_BYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s: %s; products are compared again", path, error)
        return None


def keep_choices(path: Path, chosen: set[Key]) -> set[Key]:
    """Keep a choice, whole or not at all; return it, or what another load has kept meanwhile.

    A folder that takes none is told of in the log.
    """
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        part.write_bytes(msgspec.json.encode(sorted(chosen)) + b"\n")
        try:
            path.hardlink_to(part)
        except FileExistsError:
            if (found := read_choices(path)) is not None:
                return found
            part.replace(path)  # a damaged one
    except OSError as error:
        log.warning("%s could not be kept (%s): loads may differ in bits", path, error.strerror)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return chosen
