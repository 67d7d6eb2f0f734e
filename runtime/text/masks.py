"""Masks of tokens by grammars, found beside the steps: while logits are computed.

In: grammars, and the tokens that were chosen. Out: for each request whether a token may come next,
or all that may, as a ceiling of its logits. Two threads work here: one reads new grammars, another
finds masks; in both llguidance lets the interpreter's lock go.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import RequestError
from dovetail.runtime.text.grammar import make_limits, shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Logits: TypeAlias = npt.NDArray[np.float32]
EXCLUDED = np.float32(-np.inf)
PATIENCE = 1.0
"""Seconds that a step waits for masks, of which a row takes some 0.03 ms. A grammar that takes more
is given up, with the thread that follows it: others go on with a new one."""
KEPT = 32
"""Grammars that are kept in the form in which they are followed: those that were used last, beside
those of requests."""
TOO_MUCH = "the structured output takes too much time or memory to follow"
QUOTE = ord('"')
READER, FOLLOWER = "dovetail-grammars", "dovetail-masks"
WORD = 32
"""Bits of a mask's word, one for each token."""
LAST = 256
"""Tokens before a request's limit from which it is looked how many the form still needs. So many
are tried at most."""
SPARE = 8
"""Tokens that are left when an answer has come to its end: the next one may need more."""
SHORT = 32
"""Tokens of an end up to which it is looked, token by token, whether one fits behind what the model
chooses: a choice or a number is the model's own then. That takes some ms each time."""
TRIES = 4
"""Likeliest tokens that a greedy choice tries before all that may come next are found: some 0.01 ms
each, a mask takes up to 40 times as long."""
QUICK = 1e-3
"""Seconds that a mask took, up to which the next one is found at once where it is needed at once:
sooner than another thread wakes up."""


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CEILINGS = np.where(_BITS, np.float32(np.inf), EXCLUDED).astype(np.float32)
"""For each byte of a mask the ceilings of its 8 tokens [256][8]: inf, or -inf."""

_MARKS = re.compile(r'(?:/|\b[A-Z][A-Z0-9_]*) (?:("(?:[^"\\]|\\.)*")$|<\[(\d+)\]>)', re.MULTILINE)
"""In Lark what stands behind an expression or a terminal, as a text or as a token."""

PLAIN = 3.0
"""What a letter costs on the way to the end of an answer that ends or parts nothing."""


def _costs() -> npt.NDArray[np.float64]:
    """Return what each letter costs on the way to the end of an answer: of JSON what ends is cheap.

    What opens something, parts of characters and white space come last.
    """
    costs = np.full(256, PLAIN)
    costs[128:] = 50.0
    for cost, letters in ((0, b'"}]'), (1, b",:"), (2, b"0123456789"), (100, b"{[\\")):
        costs[list(letters)] = cost
    costs[list(b" \t\r\n")] = 200.0
    return costs


_COSTS = _costs()
AGAIN = 2.0
"""What a letter costs more each time, until a text begins or ends."""
REFUSED = 1.0
"""What a plain letter costs more that may not come yet: those that may are found sooner then."""

Bits: TypeAlias = npt.NDArray[np.uint8]
"""A mask: a bit for each token."""


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens as grammars need them.

    ends: the mask of its end tokens. letters: the token of each byte alone; -1 where there is none.
    """

    size: int
    tree: LLTokenizer
    ends: Bits
    letters: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tree: LLTokenizer, size: int, ends: Collection[int]) -> Vocabulary:
        """Return the vocabulary of a tokenizer; `ends`: the model's end tokens."""
        letters = np.full(256, -1, np.int64)
        for token in range(size):
            text = tree.decode_bytes([token])
            if len(text) == 1 and not tree.is_special_token(token):
                letters[text[0]] = token
        mask = np.zeros(-(-size // WORD) * WORD // 8, np.uint8)
        for token in ends:
            mask[token >> 3] |= 1 << (token & 7)
        return cls(size, tree, mask, letters)

    def spell_marks(self, grammar: str) -> list[list[int]]:
        """Return the tokens of the marks with which texts of a grammar end, each once."""
        spelled = [
            [int(token)]
            if token
            else [int(self.letters[byte]) for byte in json.loads(text).encode()]
            for text, token in dict.fromkeys(_MARKS.findall(grammar))
        ]
        return [tokens for tokens in spelled if min(tokens, default=-1) >= 0]


class TokenMask:
    """What the grammar of one request lets through next: a Mask of its rules.

    The likeliest token of all is the likeliest of those that a grammar lets through, if it is one
    of them. That is known a hundred times sooner than the mask, so a greedy choice is tried without
    it; then the token that the text forces, or the next ones. So is a drawn one: where it is
    refused, another is drawn under the mask, and each comes as often as if the first one had been.
    But `top_p`, `top_k` and `min_p` count what is let through alone: they need the mask.
    An answer that its limit would cut off comes to its end before, as far as one can be found: what
    is cut off has not the form that was asked for.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        words: Vocabulary,
        wait: Callable[[TokenMask], None],
        left: int,
        tries: int | None,
        marks: Sequence[list[int]] = (),
    ) -> None:
        """`wait` returns once `find` has run; it raises RequestError where it will not soon.

        tries: more choices than one that are tried without a mask; None = none at all is. marks:
        tokens with which texts end that have no quotes.
        """
        self._matcher, self._words, self._wait = matcher, words, wait
        self._bits = np.zeros(-(-words.size // WORD), np.int32)
        self._bytes = self._bits.view(np.uint8)
        self._ceiling = np.empty((len(self._bytes), 8), np.float32)
        self._row = self._ceiling.reshape(-1)[: words.size]
        self._expanded = b""  # the bits of which `_ceiling` is made
        self._failed = False
        self._look_at = LAST  # tokens left when to look again for an end
        self._last: list[int] | None = None  # the tokens to the end, the next one last
        self._way: list[int] | None = None  # an end that fits, taken if what is chosen allows none
        self._longest = 0  # tokens of the longest end so far: a list's next item may need as many
        self._tries, self._marks = tries, marks
        self._took = float("inf")  # seconds of the last mask
        self._refused: list[int] = []  # choices of the next token
        self.forced: list[int] = []  # once one is refused: the text that must come
        self._bound = False  # whether the next token is chosen under the mask
        self.ended = matcher.is_stopped()
        self.left = left  # tokens that the request may still have
        self.found = not self.due
        self.batch: _MaskBatch | None = None

    @property
    def due(self) -> bool:
        """Whether `find` has to run before the next token is chosen."""
        return self._binds or self.left <= self._look_at

    @property
    def _binds(self) -> bool:
        """Whether the next token is chosen under the mask."""
        if self._tries is None or self.ended or self._last is not None:
            return True
        return len(self._refused) > self._tries and not self.forced

    def apply(self, logits: Logits) -> None:
        """Exclude from a row [vocab] what the grammar does not let through, if `due`.

        Raises RequestError where it cannot be followed any further.
        """
        if not self.found:
            self._wait(self)
        if self._failed:
            raise RequestError(f"{TOO_MUCH}: {shorten(self._matcher.get_error())}")
        if self._bound:
            np.minimum(logits, self._row, out=logits)
        elif self.forced:
            kept = logits[self.forced[0]]
            logits.fill(EXCLUDED)
            logits[self.forced[0]] = kept
        elif self._refused:
            logits[self._refused[-1]] = EXCLUDED

    def take(self, token: int) -> bool:
        """Consume the token that was chosen; False where `apply` must come first."""
        if self._bound:
            self._matcher.consume_token(token)
        elif self._matcher.try_consume_tokens([token]) != 1:
            if not self._refused:
                self.forced = self._matcher.compute_ff_tokens()
            self._refused.append(token)
            if self._binds and self._took < QUICK and self.left > self._look_at:
                self._bind()
            self.found = self._bound or not self.due
            return False
        if (way := self._way) is not None and not self._fits(token) and not self.forced:
            self._matcher.rollback(1)
            self._last, self._way = way, None
            self._refused, self._bound, self.found = [], False, False
            return False
        self.ended = self._matcher.is_stopped()
        self.left -= 1
        self._refused, self.forced, self._bound = [], [], False
        if self._last is None and self.left <= self._look_at and self._matcher.is_accepting():
            self._look()  # which ends at once
        self.found = not self.due
        return True

    def _fits(self, token: int) -> bool:
        """See whether an end still fits behind a token that was consumed."""
        left, way = self.left - 1, self._way
        if self._matcher.is_accepting():
            way = []
        elif way and way[-1] == token:
            way = way[:-1]
        else:
            way = self._find_end(left)
        self._way = way if way is not None and len(way) < left else None
        return self._way is not None or self._matcher.is_stopped()

    def force(self) -> list[int]:
        """Return tokens of the text that must come next; asked between `take` and `find`."""
        return self._matcher.compute_ff_tokens() if self._last is None else []

    def count_accepted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow; all while the thread is at the mask."""
        if not self.found:
            return len(tokens)
        return self._matcher.validate_tokens(list(tokens)) if self._last is None else 0

    # ---- on the thread that finds masks ----

    def find(self) -> None:
        """See whether an end is near, and find what may come next where that is `due`."""
        if self._last is None and self.left <= self._look_at and not self.ended:
            self._look()
        if self._binds:
            self._bind()
        self.found = True

    def _bind(self) -> None:
        begun = time.perf_counter()
        self._matcher.unsafe_compute_mask_ptr(int(self._bits.ctypes.data), self._bits.nbytes)
        self._took = time.perf_counter() - begun
        if self._last is not None:
            self._bytes[:] = self._words.ends if not self._last else _only(self._bytes, self._last)
        bits = self._bytes.tobytes()
        if bits != self._expanded:  # within a text they seldom change
            np.take(_CEILINGS, self._bytes, axis=0, out=self._ceiling, mode="clip")
            self._expanded = bits
        self._bound, self._failed = True, self._matcher.is_error()

    def _look(self) -> None:
        """See whether the answer must come to its end now, or when to look again."""
        way = None if self._matcher.is_accepting() else self._find_end(self.left)
        if way is not None and len(way) >= self.left:  # too long: what is chosen may be shorter
            way = None
        self._longest = max(self._longest, len(way or ()))
        gap = LAST if way is None else self.left - self._longest - 1 - SPARE
        if gap <= 0 and self._longest <= SHORT:
            self._way, self._look_at = way, -1
            return
        if gap <= 0:
            self._last = way
        # a look takes milliseconds: rarely where there was no end yet
        self._look_at = self.left - max(1, min(gap // 2, self.left // 2 if way is None else LAST))

    def _find_end(self, left: int) -> list[int] | None:
        """Return tokens by which the answer comes to its end soon, the first one last.

        None where none are found. Letter by letter the cheapest one is taken; each time it costs
        more, so that there is an end to digits, too.
        """
        matcher, cost, way = self._matcher.deep_copy(), _COSTS.copy(), list[int]()
        while len(way) < min(left, LAST):
            if forced := matcher.compute_ff_tokens():
                matcher.consume_tokens(forced)
                way += forced
            if matcher.is_accepting():
                return way[::-1]
            if mark := self._find_mark(matcher):
                matcher.consume_tokens(mark)
                way += mark
                continue
            letter = self._choose(matcher, cost)
            if letter is None or not matcher.consume_token(int(self._words.letters[letter])):
                return None
            way.append(int(self._words.letters[letter]))
            cost[letter] += AGAIN
            if letter == QUOTE:
                cost = _COSTS.copy()
        return None

    def _find_mark(self, matcher: LLMatcher) -> list[int]:
        """Return a mark that ends something here: behind it all is forced, or may end."""
        for mark in self._marks:
            if matcher.validate_tokens(mark) == len(mark):
                after = matcher.deep_copy()
                after.consume_tokens(mark)
                if after.is_accepting() or after.compute_ff_bytes():
                    return mark
        return []

    def _choose(self, matcher: LLMatcher, cost: npt.NDArray[np.float64]) -> int | None:
        """Return the cheapest letter that may come next, None where none may.

        They are tried one by one: 200 tries take less than a mask.
        """
        letters = self._words.letters
        if forced := matcher.compute_ff_bytes():
            return forced[0] if letters[forced[0]] >= 0 else None
        for letter in cost.argsort(kind="stable").tolist():
            if letters[letter] >= 0 and matcher.validate_tokens([int(letters[letter])]) == 1:
                return int(letter)
            if _COSTS[letter] >= PLAIN:
                cost[letter] += REFUSED
        return None


def _only(mask: Bits, last: list[int]) -> Bits:
    """Return a mask with the next of the last tokens alone, which is taken off."""
    token, found = last.pop(), np.zeros_like(mask)
    found[token >> 3] = 1 << (token & 7)
    return found


class _MaskBatch:
    """Masks that are found together, one after the other, by one task of the thread."""

    def __init__(self, masks: Sequence[TokenMask], thread: ThreadPoolExecutor) -> None:
        self.masks = masks
        for mask in masks:
            mask.found, mask.batch = False, self
        self.done = thread.submit(self._find)

    def _find(self) -> None:
        for mask in self.masks:
            if mask.batch is not self:  # it was given to another thread
                return
            mask.find()


class Grammars:
    """The grammars of one engine's requests. Any thread may have one read."""

    def __init__(self, tokenizer: Path | None, vocab_size: int, ends: Iterable[int]) -> None:
        """`tokenizer`: a tokenizer.json. `ends`: the model's end tokens."""
        self._path, self._vocab_size = tokenizer, vocab_size
        self._ends = sorted(token for token in ends if token < vocab_size)  # others never come
        self._read = WeakValueDictionary[str, Future["LLMatcher"]]()  # that somebody still has
        self._held = WeakKeyDictionary[object, Future["LLMatcher"]]()  # by who has it
        self._last_used = lru_cache(KEPT)(self._start)
        self._lock = threading.Lock()
        self._under_way: list[TokenMask] = []
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._pid = os.getpid()

    def read(self, grammar: str) -> Future[LLMatcher]:
        """Return the future of a grammar as it is followed, which is copied for each request.

        It raises RequestError where llguidance does not take grammar or tokenizer.
        """
        with self._lock:
            return self._last_used(grammar)

    def _start(self, grammar: str) -> Future[LLMatcher]:
        found = self._read.get(grammar)
        if found is None:
            found = self._read[grammar] = self._thread(READER).submit(self._compile, grammar)
        return found

    def hold(self, owner: object, read: Future[LLMatcher]) -> None:
        """Keep what was read as long as there is its `owner`: when that is opened nobody waits."""
        with self._lock:
            self._held[owner] = read

    def warm(self) -> None:
        """Have the vocabulary read soon, which takes as long as many grammars do."""
        if self._path is not None:
            with self._lock:
                self._thread(READER).submit(lambda: self._words)

    # ---- on the engine's thread ----

    def open(self, grammar: str, left: int, tries: int | None) -> TokenMask:
        """Return the mask of a new request; waits for a grammar that is still being read.

        left: tokens that the request may have. tries: as of `TokenMask`.
        """
        matcher = self.read(grammar).result().deep_copy()
        marks = self._words.spell_marks(grammar)
        mask = TokenMask(matcher, self._words, self._wait, left, tries, marks)
        self.follow([mask])
        return mask

    def follow(self, masks: Iterable[TokenMask]) -> None:
        """Have found what is due of masks; return at once."""
        masks = [mask for mask in masks if not mask.found]
        if not masks:
            return
        self._under_way = [*(mask for mask in self._under_way if not mask.found), *masks]
        _MaskBatch(masks, self._thread(FOLLOWER))

    def _wait(self, mask: TokenMask) -> None:
        """Return once a mask has been found; RequestError where the thread has got stuck in it."""
        while not mask.found:  # others of its batch may not be
            if mask.batch is None:
                raise RequestError(TOO_MUCH)
            try:
                mask.batch.done.result(PATIENCE)
            except TimeoutError:
                self._leave_stuck()

    def _leave_stuck(self) -> None:
        """Leave the thread alone with the mask that it is at; another one finds the others."""
        left = [mask for mask in self._under_way if not mask.found]
        if not left:  # it has just ended
            return
        left[0].batch, self._under_way = None, []
        self._threads.pop(FOLLOWER).shutdown(wait=False, cancel_futures=True)
        if left[1:]:
            self.follow(left[1:])

    def close(self) -> None:
        """End the threads."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _thread(self, name: str) -> ThreadPoolExecutor:
        if self._pid != os.getpid():  # in a fork there are none
            self._threads, self._pid = {}, os.getpid()
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, name)
        return self._threads[name]

    # ---- on the thread that reads ----

    @cached_property
    def _words(self) -> Vocabulary:
        """The model's tokens as a tree, which all grammars share."""
        import llguidance  # noqa: PLC0415 - most engines follow no grammar

        if self._path is None:
            raise RequestError("structured output is not available: the model has no tokenizer")
        size, ends = self._vocab_size, self._ends
        try:
            tree = llguidance.LLTokenizer(str(self._path), n_vocab=size, eos_token=ends)
        except Exception as error:  # the library raises what comes
            raise RequestError(
                f"structured output is not available with this model's tokenizer: {error}"
            ) from None
        return Vocabulary.of(tree, size, ends)

    def _compile(self, grammar: str) -> LLMatcher:
        import llguidance  # noqa: PLC0415

        found = llguidance.LLMatcher(self._words.tree, grammar, limits=make_limits(), log_level=0)
        if found.is_error():
            said = shorten(found.get_error())
            raise RequestError(f"the structured output cannot be followed: {said}")
        found.compute_bitmask()  # what copies share of it is found once
        return found
