"""What a load test sends, where and when: a server, datasets of prompts, arrivals at a rate.

In: the options of `dovetail bench serve`. Out: a `Target`, `Planned` requests. Lengths are tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from dovetail.errors import SpecError

if TYPE_CHECKING:
    import numpy as np

    from dovetail.runtime.text.tokenizer import Tokenizer

CHAT = "openai-chat"
ENDPOINTS = dict.fromkeys(("openai", "vllm"), "/v1/completions") | {CHAT: "/v1/chat/completions"}

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")
FIRST_ID, IDS = 10, 400
"""Random prompts are made of these token ids, which every vocabulary has and none ends with."""
TRIES = 10
"""How often the words of a random prompt are drawn."""
SHAREGPT = ((5.0, 1.1), (4.9, 1.0))
"""Mean and deviation of the logarithms of prompt and answer lengths, like those of ShareGPT."""


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """What to send. rate: requests per second, infinite for all at once, None as recorded."""

    PANEL = "Load"

    dataset_name: Annotated[
        str, "Dataset: random, sharegpt (lengths like it), azure, mooncake, burstgpt or custom."
    ] = "random"
    dataset_path: Annotated[Path | None, "File of the trace or custom dataset."] = None
    num_prompts: Annotated[int, "Number of requests to send."] = 100
    rate: float | None = math.inf
    burstiness: Annotated[
        float, "Shape of the arrival intervals (gamma): 1 is Poisson, less is more bursty."
    ] = 1.0
    random_input_len: Annotated[int, "Mean tokens of random prompts."] = 128
    random_output_len: Annotated[int, "Mean tokens of answers."] = 32
    random_range_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Range of random lengths around the mean.")
    ] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, prompts and arrivals.")] = 0
    tokenizer: Annotated[
        str | None,
        "Model whose tokenizer makes and counts prompts and answers: directory, GGUF, hub id.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server and how to ask it; timeout: seconds for a request."""

    PANEL = "Server"

    base_url: Annotated[str | None, "URL of the server; default from host and port."] = None
    host: Annotated[str, "Address of the server if there is no URL."] = "127.0.0.1"
    port: Annotated[int, "Port of the server if there is no URL."] = 8000
    backend: Annotated[str, "API to use: openai (same as vllm) or openai-chat."] = "openai"
    endpoint: Annotated[str | None, "Path of requests; default by the backend."] = None
    model: Annotated[str | None, "Name of the model; default the server's first."] = None
    api_key: Annotated[str | None, typer.Option(help="API key.", envvar="OPENAI_API_KEY")] = None
    ignore_eos: Annotated[bool, "Generate all tokens even if the model ends earlier."] = False
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum requests in progress.")
    ] = None
    timeout: float = 600.0

    @property
    def root(self) -> str:
        """The address that paths are added to."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def url(self) -> str:
        """The address that requests go to."""
        return self.root + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The header that carries the key, of any letters."""
        return {b"authorization": b"Bearer " + os.fsencode(self.api_key)} if self.api_key else {}

    def body(self, planned: Planned) -> dict[str, Any]:
        """Return the body of a request."""
        prompt: dict[str, Any]
        if self.backend == CHAT:
            prompt = {"messages": [{"role": "user", "content": planned.words()}]}
        else:
            random = planned.text is None
            prompt = {"prompt": planned.token_ids() if random else planned.text}
        return {
            **prompt,
            "model": self.model,
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


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
        import numpy as np

        rng = np.random.default_rng(self.seed)
        found: list[int] = rng.integers(FIRST_ID, FIRST_ID + IDS, self.input_tokens).tolist()
        return found

    def words(self) -> str:
        """Return the prompt as text: the given one, else a word for each token."""
        if self.text is not None:
            return self.text
        import numpy as np

        chosen = np.random.default_rng(self.seed).integers(0, len(WORDS), self.input_tokens)
        return " ".join(WORDS[i] for i in chosen)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Requests of a dataset; `times` in seconds where it has any."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    texts: Sequence[str] = ()
    times: Sequence[float] = ()


def read_load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a model; SpecError where it has none."""
    from dovetail.compiler.models.hub import find_model
    from dovetail.compiler.models.source import TOKENIZER, open_model
    from dovetail.runtime.text.tokenizer import Tokenizer

    source = open_model(find_model(name))
    content = source.file(TOKENIZER)
    if content is None:
        raise SpecError(f"{name} has no {TOKENIZER}; give a model that has one as --tokenizer")
    found = Tokenizer(source.path / TOKENIZER, content)
    found.check()
    return found


def write_prompt(tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Return random words of `tokens` tokens, or as near as a few tries come.

    Where words are cut between tokens, what is left may be read as others.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    for _ in range(TRIES):
        words = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), tokens))
        text = tokenizer.decode(tokenizer.encode(words, special=False)[:tokens])
        if len(tokenizer.encode(text, special=False)) == tokens:
            break
    return text


def plan_load(
    spec: LoadSpec, context: int | None, tokenizer: Tokenizer | None = None
) -> list[Planned]:
    """Return the requests of `spec`, cut to what a `context` of so many tokens holds.

    tokenizer: makes the texts of random prompts, and counts those of given ones.

    Raises SpecError for an unknown dataset, a file that is not one, or a rate without sense.
    """
    if spec.dataset_name not in DATASETS:
        raise SpecError(f"no dataset {spec.dataset_name!r}; choose one of {', '.join(DATASETS)}")
    if (
        spec.num_prompts < 1
        or not spec.burstiness > 0
        or (spec.rate is not None and not spec.rate > 0)
    ):
        raise SpecError("--num-prompts, --request-rate and --burstiness must be above 0")
    import numpy as np

    rng = np.random.default_rng(spec.seed)
    found = DATASETS[spec.dataset_name](spec, rng)
    count = min(spec.num_prompts, len(found.inputs))
    times = _arrivals(spec, found.times[:count], count, rng)
    planned = []
    for i in range(count):
        text = found.texts[i] if found.texts else None
        wanted, answer = max(1, found.inputs[i]), max(1, found.outputs[i])
        if tokenizer is not None and text is not None:
            wanted = max(1, len(tokenizer.encode(text)))
        if context is not None:
            wanted = min(wanted, context // 2)
            answer = min(answer, context - wanted)
        if tokenizer is not None and text is None:
            text = write_prompt(tokenizer, wanted, spec.seed + i)
            wanted = len(tokenizer.encode(text, special=False))
        planned.append(Planned(times[i], wanted, answer, text, spec.seed + i))
    return planned


def _arrivals(
    spec: LoadSpec, recorded: Sequence[float], count: int, rng: np.random.Generator
) -> list[float]:
    if spec.rate is None:
        if not recorded:
            raise SpecError(f"{spec.dataset_name} has no times of arrival; give --request-rate")
        return [at - recorded[0] for at in recorded]
    if math.isinf(spec.rate):
        return [0.0] * count
    gaps = rng.gamma(spec.burstiness, 1 / (spec.rate * spec.burstiness), count)
    times: list[float] = gaps.cumsum().tolist()
    return [at - times[0] for at in times]


def _random(spec: LoadSpec, rng: np.random.Generator) -> _Lengths:
    def draw(mean: int) -> list[int]:
        low, high = mean * (1 - spec.random_range_ratio), mean * (1 + spec.random_range_ratio)
        drawn: list[int] = rng.integers(round(low), round(high) + 1, spec.num_prompts).tolist()
        return drawn

    return _Lengths(draw(spec.random_input_len), draw(spec.random_output_len))


def _sharegpt(spec: LoadSpec, rng: np.random.Generator) -> _Lengths:
    import numpy as np

    inputs, outputs = (
        np.ceil(rng.lognormal(mean, deviation, spec.num_prompts)).astype(int).tolist()
        for mean, deviation in SHAREGPT
    )
    return _Lengths(inputs, outputs)


def _trace(spec: LoadSpec, _rng: np.random.Generator) -> _Lengths:
    from dovetail.compiler.rules.workload import read_times, read_workload

    file = _file(spec)
    lengths = read_workload(file)
    return _Lengths(lengths.prompt_lengths, lengths.output_lengths, times=read_times(file))


class _PromptLine(msgspec.Struct):
    """A line of a custom dataset."""

    prompt: str
    output_tokens: int | None = None


def _custom(spec: LoadSpec, _rng: np.random.Generator) -> _Lengths:
    file = _file(spec)
    try:
        lines = [
            msgspec.json.decode(line, type=_PromptLine)
            for line in file.read_bytes().splitlines()
            if line.strip()
        ]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: {error}; lines are objects with `prompt`") from None
    outputs = [line.output_tokens or spec.random_output_len for line in lines]
    texts = [line.prompt for line in lines]
    return _Lengths([1] * len(lines), outputs, texts)


def _file(spec: LoadSpec) -> Path:
    if spec.dataset_path is None:
        raise SpecError(f"the dataset {spec.dataset_name!r} needs --dataset-path FILE")
    return spec.dataset_path


DATASETS: dict[str, Callable[[LoadSpec, np.random.Generator], _Lengths]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "azure": _trace,
    "mooncake": _trace,
    "burstgpt": _trace,
    "custom": _custom,
}
"""Names of datasets; the traces are told apart by their columns."""
