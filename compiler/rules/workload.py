"""What a model will be asked: prompt and output lengths, from a trace or assumed.

In: a CSV or JSONL trace (columns of the Azure, Mooncake, BurstGPT, Vidur, NEO or ShareGPT sets, or
our own). Out: WorkloadSpec, from which the payload takes its M values and their weights.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dovetail.compiler.files.config import parse_json, read_bounded
from dovetail.ir.errors import SpecError

MAX_TRACE_BYTES = 1 << 30
MAX_TOKENS = 1 << 27
PROMPT_COLUMNS = (
    "ContextTokens",  # Azure
    "input_length",  # Mooncake
    "Request tokens",  # BurstGPT
    "num_prefill_tokens",  # Vidur
    "input_tokens",
    "prompt_tokens",  # our own
    "prompt_len",  # ShareGPT samplers
    "prompt_length",
)
OUTPUT_COLUMNS = (
    "GeneratedTokens",
    "output_length",
    "Response tokens",
    "num_decode_tokens",
    "output_tokens",
    "completion_tokens",
    "output_len",
    "response_length",
)


TIME_COLUMNS: dict[str, Callable[[str], float]] = {
    "TIMESTAMP": lambda text: datetime.fromisoformat(text).timestamp(),  # Azure
    "timestamp": lambda text: float(text) / 1000,  # Mooncake, in milliseconds
    "Timestamp": float,  # BurstGPT
    "arrival_s": float,  # our own
}
"""Columns that say when a request came, and how they become seconds."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Lengths in tokens, one pair per request. `source` is a file name or `default`.

    concurrency: sequences decoded together at most.
    """

    source: str
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    concurrency: int = 16

    @property
    def fingerprint(self) -> str:
        """A sha256 over the lengths; where the file lies does not matter."""
        text = json.dumps([self.prompt_lengths, self.output_lengths, self.concurrency])
        return hashlib.sha256(text.encode()).hexdigest()

    def batches(self, most: int) -> tuple[int, ...]:
        """Return the numbers of sequences that decode together: powers of two up to `most`."""
        return tuple(1 << i for i in range(min(self.concurrency, most).bit_length()))

    def step_sizes(self, max_tokens: int) -> dict[int, float]:
        """Return M -> share of steps that have M token rows; M is at most `max_tokens`.

        Prompts are cut into chunks of max_tokens; decode steps are spread evenly over the powers
        of two up to the concurrency, since how many requests meet is not known from lengths alone.
        """
        counts: dict[int, float] = {}
        for length in self.prompt_lengths:
            for size in (max_tokens,) * (length // max_tokens) + (length % max_tokens,):
                if size:
                    bucket = _bucket(size, max_tokens)
                    counts[bucket] = counts.get(bucket, 0.0) + 1.0
        batches = self.batches(max_tokens)
        decode_steps = sum(self.output_lengths)
        for batch in batches:
            steps = decode_steps / len(batches) / batch
            counts[batch] = counts.get(batch, 0.0) + steps
        total = sum(counts.values())
        return {size: count / total for size, count in sorted(counts.items())}


DEFAULT_WORKLOAD = WorkloadSpec(
    source="default",
    prompt_lengths=(16, 32, 64, 128, 256, 512, 512, 1024, 2048),
    output_lengths=(128,) * 9,
)
"""Interactive use: prompts up to 2048 tokens, 128 tokens of answer."""


def read_workload(path: str | Path | None) -> WorkloadSpec:
    """Read a trace (.csv, .jsonl, either also .gz); None gives DEFAULT_WORKLOAD.

    Raises SpecError naming the file and line for a missing file, unknown columns or a bad length.
    """
    if path is None:
        return DEFAULT_WORKLOAD
    file = Path(path)
    columns: list[str] = []
    pairs: list[tuple[int, ...]] = []
    for number, record in enumerate(_records(file), 1):
        known = (PROMPT_COLUMNS, OUTPUT_COLUMNS)
        columns = columns or [_column(record, names, file) for names in known]
        where = f"{file} request {number}"
        pairs.append(tuple(_length(record.get(c), f"{where}: {c}") for c in columns))
    if not any(map(any, pairs)):
        raise SpecError(f"{file} has no requests of any length")
    prompts, outputs = zip(*pairs, strict=True)
    return WorkloadSpec(file.name, prompts, outputs)


def read_times(path: str | Path) -> tuple[float, ...]:
    """Return when the requests of a trace came, in seconds from some point on; () if it says not.

    Raises SpecError naming the file and line for a missing file or a bad time.
    """
    file = Path(path)
    times: list[float] = []
    column: str | None = None
    for number, record in enumerate(_records(file), 1):
        column = column or next((name for name in TIME_COLUMNS if name in record), None)
        if column is None:
            return ()
        try:
            times.append(TIME_COLUMNS[column](str(record.get(column))))
        except ValueError:
            problem = f"{column} is {record.get(column)!r}, not a time"
            raise SpecError(f"{file} request {number}: {problem}") from None
    return tuple(times)


def _records(file: Path) -> Iterator[Mapping[str, Any]]:
    text = _text(file)
    if ".csv" in file.suffixes:
        try:
            yield from csv.DictReader(io.StringIO(text))
        except csv.Error as error:
            raise SpecError(f"{file} is not valid CSV: {error}") from None
    elif ".jsonl" in file.suffixes:
        for number, line in enumerate(text.split("\n"), 1):  # other separators may stand in texts
            if not line.strip():
                continue
            record = parse_json(line, f"{file} line {number}")
            if not isinstance(record, dict):
                raise SpecError(f"{file} line {number} is not a JSON object")
            yield record
    else:
        raise SpecError(f"{file}: the trace must be a .csv or .jsonl file")


def _text(file: Path) -> str:
    if not file.is_file():
        raise SpecError(f"there is no trace {file}")
    data = read_bounded(file, MAX_TRACE_BYTES)
    try:
        if file.suffix == ".gz":
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(MAX_TRACE_BYTES)
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SpecError(f"{file} cannot be read as a text trace: {error}") from None


def _column(record: Mapping[str, Any], known: tuple[str, ...], file: Path) -> str:
    for column in known:
        if column in record:
            return column
    raise SpecError(f"{file} has none of the columns {', '.join(known)}")


def _length(value: object, where: str) -> int:
    try:
        length = int(str(value))
    except ValueError:
        length = -1
    if not 0 <= length <= MAX_TOKENS:
        raise SpecError(f"{where} is {value!r}, not a number of tokens")
    return length


def _bucket(size: int, largest: int) -> int:
    """Return the power of two at or above a size, cut to the largest step."""
    return min(largest, 1 << (size - 1).bit_length())
