"""What a load test sends, and when: datasets of lengths or prompts, and arrivals at a rate.

In: a dataset's name and file, a rate. Out: `Planned` requests. Lengths are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from dovetail.errors import SpecError

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")
FIRST_ID, IDS = 10, 400
"""Random prompts are made of these token ids, which every vocabulary has and none ends with."""
SHAREGPT = ((5.0, 1.1), (4.9, 1.0))
"""Mean and deviation of the logarithms of prompt and answer lengths, like those of ShareGPT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """What to send. rate: requests per second, infinite for all at once, None as recorded.

    burstiness: of the gamma distribution between arrivals; 1 is a Poisson process. range_ratio:
    random lengths lie so far, relatively, around the means.
    """

    dataset: str = "random"
    path: Path | None = None
    count: int = 100
    rate: float | None = math.inf
    burstiness: float = 1.0
    input_tokens: int = 128
    output_tokens: int = 32
    range_ratio: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send `at` seconds after the start; a text, or so many random tokens."""

    at: float
    input_tokens: int
    output_tokens: int
    text: str | None = None
    seed: int = 0

    def token_ids(self) -> list[int]:
        """Return the random prompt as token ids."""
        rng = np.random.default_rng(self.seed)
        found: list[int] = rng.integers(FIRST_ID, FIRST_ID + IDS, self.input_tokens).tolist()
        return found

    def words(self) -> str:
        """Return the prompt as text: the given one, else a word for each token."""
        if self.text is not None:
            return self.text
        chosen = np.random.default_rng(self.seed).integers(0, len(WORDS), self.input_tokens)
        return " ".join(WORDS[i] for i in chosen)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Requests of a dataset; `times` in seconds where it has any."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    texts: Sequence[str] = ()
    times: Sequence[float] = field(default=())


def plan_load(spec: LoadSpec, context: int | None) -> list[Planned]:
    """Return the requests of `spec`, cut to what a `context` of so many tokens holds.

    Raises SpecError for an unknown dataset, a file that is not one, or a rate without sense.
    """
    if spec.dataset not in DATASETS:
        raise SpecError(f"no dataset {spec.dataset!r}; there is {', '.join(DATASETS)}")
    if spec.count < 1 or not spec.burstiness > 0 or (spec.rate is not None and not spec.rate > 0):
        raise SpecError("requests, rate and burstiness must be above 0")
    rng = np.random.default_rng(spec.seed)
    found = DATASETS[spec.dataset](spec, rng)
    count = min(spec.count, len(found.inputs))
    times = _arrivals(spec, found.times[:count], count, rng)
    planned = []
    for i in range(count):
        wanted, answer = max(1, found.inputs[i]), max(1, found.outputs[i])
        if context is not None:
            wanted = min(wanted, context // 2)
            answer = min(answer, context - wanted)
        text = found.texts[i] if found.texts else None
        planned.append(Planned(times[i], wanted, answer, text, spec.seed + i))
    return planned


def _arrivals(
    spec: LoadSpec, recorded: Sequence[float], count: int, rng: np.random.Generator
) -> list[float]:
    if spec.rate is None:
        if not recorded:
            raise SpecError(f"{spec.dataset} has no times of arrival; give --request-rate")
        return [at - recorded[0] for at in recorded]
    if math.isinf(spec.rate):
        return [0.0] * count
    gaps = rng.gamma(spec.burstiness, 1 / (spec.rate * spec.burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return [at - times[0] for at in times]


def _random(spec: LoadSpec, rng: np.random.Generator) -> _Lengths:
    def draw(mean: int) -> list[int]:
        low, high = mean * (1 - spec.range_ratio), mean * (1 + spec.range_ratio)
        drawn: list[int] = rng.integers(round(low), round(high) + 1, spec.count).tolist()
        return drawn

    return _Lengths(draw(spec.input_tokens), draw(spec.output_tokens))


def _sharegpt(spec: LoadSpec, rng: np.random.Generator) -> _Lengths:
    inputs, outputs = (
        np.ceil(rng.lognormal(mean, deviation, spec.count)).astype(int).tolist()
        for mean, deviation in SHAREGPT
    )
    return _Lengths(inputs, outputs)


def _trace(spec: LoadSpec, _rng: np.random.Generator) -> _Lengths:
    from dovetail.compiler.workload import read_times, read_workload

    file = _file(spec)
    lengths = read_workload(file)
    return _Lengths(lengths.prompt_lengths, lengths.output_lengths, times=read_times(file))


class _Line(msgspec.Struct):
    """A line of a custom dataset."""

    prompt: str
    output_tokens: int | None = None


def _custom(spec: LoadSpec, _rng: np.random.Generator) -> _Lengths:
    file = _file(spec)
    try:
        lines = [
            msgspec.json.decode(line, type=_Line)
            for line in file.read_bytes().splitlines()
            if line.strip()
        ]
    except msgspec.DecodeError as error:
        raise SpecError(f"{file}: {error}; lines are objects with `prompt`") from None
    outputs = [line.output_tokens or spec.output_tokens for line in lines]
    texts = [line.prompt for line in lines]
    return _Lengths([1] * len(lines), outputs, texts)


def _file(spec: LoadSpec) -> Path:
    if spec.path is None:
        raise SpecError(f"the dataset {spec.dataset!r} needs --dataset-path FILE")
    return spec.path


DATASETS: dict[str, Callable[[LoadSpec, np.random.Generator], _Lengths]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "azure": _trace,
    "mooncake": _trace,
    "burstgpt": _trace,
    "custom": _custom,
}
"""Names of datasets; the traces are told apart by their columns."""
