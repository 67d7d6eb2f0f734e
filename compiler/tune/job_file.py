"""What lies beside the database while a tuning job is not complete, so that it can be resumed.

In: what a job was asked for. Out: since when records count for it, and the plans it began with:
the figures they were chosen by may have been measured anew meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import SpecError
from dovetail.ir.files import write_whole


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """A job: since when records count, all that are known if None; name: of kernels and work."""

    schema: int = 2
    since: datetime | None
    plans: tuple[ServicePlan, ...]
    name: str


def job_path(database: Path, question: Any) -> Path:
    """Return where the file of a job lies; `question` is all that the job was asked for."""
    digest = hashlib.sha256(msgspec.json.encode(question)).hexdigest()[:12]
    return database.with_name(f"{database.name}.job-{digest}")


@contextmanager
def job_on_file(path: Path, job: JobFile) -> Iterator[None]:
    """Keep the file until the job is complete; SpecError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(job))
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}; choose another --db") from None
    yield
    path.unlink(missing_ok=True)


def read_job(path: Path) -> JobFile | None:
    """Return an interrupted job, None where there is none; SpecError where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobFile)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}; choose another --db") from None
    except msgspec.DecodeError as error:
        raise SpecError(f"{path} is damaged ({error}); give --no-resume or --missing") from None
