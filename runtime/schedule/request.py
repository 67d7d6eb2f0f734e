"""Requests: what a user asks for, how far it is, and what comes back.

Sampling parameters have vLLM's names; wrong ones end in a RequestError.
"""

from __future__ import annotations

import enum
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.ir.errors import DovetailError, RequestError
from dovetail.ir.options import check_names
from dovetail.runtime.schedule.structured import StructuredOutputs, read_schema, read_structured

MAX_LOGPROBS = 100
MAX_N = 256
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_LISTED = 1024
"""Token ids or words that one option may list."""
MAX_WORD_LETTERS = 1 << 14
"""Letters of all words that one option may list: they are tokenised at once."""
MAX_REPETITION = 100.0
"""A repetition penalty lies between one over this and this: logits stay numbers in float32."""

FAILED = "error"
"""Finish reason of requests that could not be computed; `Request.error` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; the defaults are greedy.

    Order as in vLLM: temperature, top_k (0 = off), top_p, min_p. `seed` None draws one.
    `logprobs` asks for that many most likely tokens per step, 0 for the chosen one's only;
    `prompt_logprobs` likewise for the prompt's tokens, once for all `n` samples. With it
    `max_tokens` may be 0: nothing is generated.
    `min_tokens` come before any end. `stop_token_ids` end the answer as end tokens do. What
    penalties, biases, `bad_words` and `allowed_token_ids` mean: `engine/logits.py`.
    Special tokens are no part of the text, but with `skip_special_tokens` false.
    `structured_outputs` says what form the answer must have; it then ends where that does, whatever
    `min_tokens` and `ignore_eos` say.
    `adapter` is the one whose answer it is, by its name in the artifact; "" = the model's own.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # made of `bad_words` by who has a tokenizer
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    grammar: str = ""  # made of `structured_outputs` by who has a tokenizer
    adapter: str = ""

    @staticmethod
    def make(options: Mapping[str, object]) -> SamplingParams:
        """Return checked parameters from keyword options; RequestError names the wrong one.

        `schema` stands for `structured_outputs` with `json`.
        """
        if not options.keys() <= _CHECKS.keys():
            check_names("a generation", options, _CHECKS)
        checked = {name: _CHECKS[name](name, value) for name, value in options.items()}
        if (schema := checked.pop("schema", None)) is not None:
            if checked.get("structured_outputs") is not None:
                raise RequestError("give either schema or structured_outputs")
            checked["structured_outputs"] = schema
        params = SamplingParams(**checked)  # type: ignore[arg-type]
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise _wrong("max_tokens", 0, "at least 1, or come with prompt_logprobs")
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({params.max_tokens}), "
                f"not {params.min_tokens}"
            )
        return params

    def check_adapter(self, known: Collection[str]) -> None:
        """Raise RequestError where the adapter that is asked for is not among those of a model."""
        if self.adapter and self.adapter not in known:
            names = ", ".join(known) or "none"
            raise RequestError(f"there is no adapter {self.adapter!r}; the artifact has {names}")

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the model's."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return any(penalties) or bool(self.logit_bias) or self.excludes

    @property
    def excludes(self) -> bool:
        """Whether tokens may be excluded: then none may be left."""
        named = self.bad_word_ids or self.allowed_token_ids
        return bool(named or self.min_tokens or self.grammar)

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """All token ids that the options name."""
        biased = tuple(token for token, _ in self.logit_bias)
        return biased + self.stop_token_ids + self.allowed_token_ids


def _wrong(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name} must be {expected}, not {value!r}")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, value, f"a whole number from {low} to {high}")
    return value


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    if not ok or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        raise _wrong(name, value, f"a number {'above' if open_low else 'from'} {low} up to {high}")
    return float(value)  # type: ignore[arg-type]


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _stop(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else value
    ok = isinstance(found, Sequence) and all(isinstance(s, str) and s for s in found)
    if not ok:
        raise _wrong(name, value, "a non-empty text or a list of them")
    return tuple(found)  # type: ignore[arg-type]


def _listed(name: str, value: object) -> Sequence[object]:
    """Return the items of a list that is not too long; None is an empty one."""
    found = () if value is None else value
    if isinstance(found, str) or not isinstance(found, Sequence) or len(found) > MAX_LISTED:
        raise _wrong(name, value, f"a list of at most {MAX_LISTED}")
    return found


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_integer(name, item, 0, (1 << 31) - 1) for item in _listed(name, value))


def _allowed(name: str, value: object) -> tuple[int, ...]:
    found = _token_ids(name, value)
    if value is not None and not found:
        raise _wrong(name, value, "a list with at least one token id")
    return found


def _adapter(name: str, value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise _wrong(name, value, "the name of an adapter")
    return value or ""


def _words(name: str, value: object) -> tuple[str, ...]:
    found = _listed(name, value)
    if not all(isinstance(item, str) and item.strip() for item in found):
        raise _wrong(name, value, "a list of texts that are not blank")
    words = tuple(map(str, found))
    if (letters := sum(map(len, words))) > MAX_WORD_LETTERS:
        raise RequestError(f"{name} may have {MAX_WORD_LETTERS} letters in all, not {letters}")
    return words


def _bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs; JSON's ids are texts of digits, ten at most."""
    found = {} if value is None else value
    if not isinstance(found, Mapping) or len(found) > MAX_LISTED:
        raise _wrong(name, value, f"an object of at most {MAX_LISTED} token ids and their biases")
    pairs = {}
    for key, bias in found.items():
        token = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key
        pairs[_integer(name, token, 0, (1 << 31) - 1)] = _number(name, bias, -MAX_BIAS, MAX_BIAS)
    return tuple(pairs.items())


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": lambda name, v: _integer(name, v, 0, 1 << 30),
    "temperature": lambda name, v: _number(name, v, 0.0, 100.0),
    "top_p": lambda name, v: _number(name, v, 0.0, 1.0, open_low=True),
    "top_k": lambda name, v: 0 if v == -1 else _integer(name, v, 0, 1 << 30),
    "min_p": lambda name, v: _number(name, v, 0.0, 1.0),
    "seed": lambda name, v: None if v is None else _integer(name, v, -(1 << 63), (1 << 63) - 1),
    "stop": _stop,
    "ignore_eos": _flag,
    "logprobs": lambda name, v: None if v is None else _integer(name, v, 0, MAX_LOGPROBS),
    "prompt_logprobs": lambda name, v: None if v is None else _integer(name, v, 0, MAX_LOGPROBS),
    "n": lambda name, v: _integer(name, v, 1, MAX_N),
    "presence_penalty": lambda name, v: _number(name, v, -MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": lambda name, v: _number(name, v, -MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": lambda name, v: _number(name, v, 1 / MAX_REPETITION, MAX_REPETITION),
    "logit_bias": _bias,
    "min_tokens": lambda name, v: _integer(name, v, 0, 1 << 30),
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _flag,
    "bad_words": _words,
    "allowed_token_ids": _allowed,
    "skip_special_tokens": _flag,
    "structured_outputs": read_structured,
    "schema": read_schema,
    "adapter": _adapter,
}


class Home(enum.Enum):
    """The device that holds all of a request's KV."""

    GPU = "gpu"
    CPU = "cpu"
    __hash__ = object.__hash__  # enum's own is a Python function, called for each look into a dict


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token, and of the most likely ones in its place: (token id, logprob).

    `rank` is known of prompt tokens: 1 for the most likely one.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(slots=True)
class Metrics:
    """Times in seconds on the device's clock; `cached_tokens` came from shared KV blocks."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    started: float | None = None  # when it left the queue for the first time
    offloaded: bool = False  # whether it was ever computed with its KV beside the accelerator

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence being generated. `computed` counts the tokens whose K and V are stored."""

    id: int
    tokens: list[int]  # the prompt, then what was generated
    prompt_length: int
    max_tokens: int  # cut to what the context holds
    params: SamplingParams
    metrics: Metrics
    index: int = 0  # which of the n samples of its prompt
    leader: Request | None = None  # the first sample of the same prompt
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    order: tuple[int, int] = (0, 0)  # who goes first; the last one gives way
    home: Home | None = None  # where its KV is, while running; a preempted one waits again
    computed: int = 0
    served: int = 0  # number of the plan it was last part of
    hashes: list[bytes] | None = None  # of the full blocks it had on its first try to start
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from its second token on
    beside: Sequence[int] = ()  # what its answer may quote, too: it is looked up for drafts
    drafted: list[int] = field(default_factory=list)  # may follow; the step under way tells
    forced: list[int] = field(default_factory=list)  # the text that must follow by its grammar
    accepts: Callable[[Sequence[int]], int] | None = None  # tokens that its grammar lets through
    finish_reason: str | None = None  # stop, length, abort or error
    error: DovetailError | None = None  # why it failed, where its reason is `error`
    ruled: bool = field(init=False)  # whether its options change logits

    def __post_init__(self) -> None:
        """Answer once what every step asks."""
        self.ruled = self.params.changes_logits

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens whose K and V are not stored yet."""
        return len(self.tokens) - self.computed

    @property
    def unscored(self) -> range:
        """Positions of the prompt whose logits are still wanted: each scores the token after it."""
        wanted = self.params.prompt_logprobs is not None and self.index == 0
        return range(len(self.prompt_logprobs), self.prompt_length - 1) if wanted else range(0)

    @property
    def decoding(self) -> bool:
        """Whether only the token generated last is pending."""
        length = len(self.tokens)
        return length == self.computed + 1 and length > self.prompt_length

    def ends_at(self, token: int, ends: Container[int]) -> bool:
        """Whether the answer ends with `token`, its newest one; `ends`: the model's end tokens."""
        params = self.params
        if params.grammar and token in ends:  # it lets one through at its end alone
            return True
        if self.generated <= params.min_tokens:
            return False
        return token in params.stop_token_ids or (token in ends and not params.ignore_eos)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def finish(self, reason: str) -> None:
        """End it, wherever it is."""
        assert not self.finished
        self.home, self.finish_reason = None, reason


class Listener(ABC):
    """What the engine's thread tells of a request: a `Job`, or what tells one elsewhere."""

    request: Request  # once it has begun
    begun = False
    dropped = False  # before it had begun

    def begin(self, request: Request) -> None:
        """Take the request that was made for this."""
        self.request, self.begun = request, True

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.request.finished

    def extend(self) -> bool:
        """Take the newest token in; return whether the request must end at a stop text now."""
        return False

    @abstractmethod
    def show(self) -> None:
        """Pass on what has come; there is more to come."""

    @abstractmethod
    def end(self) -> None:
        """Pass on the end."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Pass on why there will be nothing more."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request gave. `token_ids` holds generated tokens only, an end token included.

    `prompt_logprobs` has an entry for each token of the prompt, None for the first, where they were
    asked for and this is the prompt's first sample.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    metrics: Metrics
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first one; None where there is a single one."""
        first, last = self.metrics.first_token, self.metrics.last_token
        if first is None or last is None or last <= first:
            return None
        return (len(self.token_ids) - 1) / (last - first)


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a text: natural logarithms, given all tokens before each.

    The first token follows nothing: its log probability is None. `top` has the most likely tokens
    in the place of each, (token id, logprob), best first, where they were asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], found: Sequence[TokenLogprob | None]) -> Score:
        """Return the score of a prompt from what was noted of each of its tokens."""
        logprobs = tuple(one.logprob if one else None for one in found)
        return cls(tuple(tokens), logprobs, tuple(one.top if one else () for one in found))

    @property
    def sum(self) -> float:
        """The log probability of all tokens after the first."""
        return math.fsum(one for one in self.logprobs if one is not None)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log probability; not a number for a single token."""
        scored = len(self.token_ids) - 1
        return math.exp(-self.sum / scored) if scored else math.nan


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed completion; `finish_reason` is set on the last one.

    `logprobs` has an entry for each token where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


MAX_PRIORITY = 100


def check_priority(priority: int) -> None:
    """Raise RequestError where `priority` is no whole number within its bounds."""
    _integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
