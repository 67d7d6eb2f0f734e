"""Masks of tokens by grammars, found beside the steps: while logits are computed.

In: grammars, and the tokens that were chosen. Out: for each request what may come next, as a
ceiling of its logits. Two threads work here: one reads new grammars, the other follows them; in
both llguidance lets the interpreter's lock go.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.logit_rules import EXCLUDED, Logits
from dovetail.runtime.text.grammar import make_limits, shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PATIENCE = 1.0
"""Seconds that a step waits for masks, of which a row takes some 0.03 ms. A grammar that takes more
is given up, with the thread that follows it: others go on with a new one."""
KEPT = 32
"""Grammars that are kept in the form in which they are followed: those that were used last."""
TOO_MUCH = "the form of the answer takes too much time or memory to follow"
READER, FOLLOWER = "dovetail-grammars", "dovetail-masks"
WORD = 32
"""Bits of a mask's word, one for each token."""


def _ceilings() -> npt.NDArray[np.float32]:
    """Return for each byte of a mask the ceilings of its 8 tokens [256][8]: inf, or -inf."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(np.inf), EXCLUDED).astype(np.float32)


_CEILINGS = _ceilings()


class TokenMask:
    """What the grammar of one request lets through next: a Mask of its rules."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, wait: Callable[[TokenMask], None]
    ) -> None:
        """`wait` returns once `find` has run; it raises RequestError where it will not soon."""
        self._matcher, self._wait = matcher, wait
        self._bits = np.zeros(-(-vocab_size // WORD), np.int32)
        self._bytes = self._bits.view(np.uint8)
        self._ceiling = np.empty((len(self._bytes), 8), np.float32)
        self._row = self._ceiling.reshape(-1)[:vocab_size]
        self.ended = False
        self.chosen: int | None = None  # a token that was not consumed yet
        self.found = False
        self.batch: _Batch | None = None

    def apply(self, logits: Logits) -> None:
        """Exclude from a row [vocab] what the grammar does not let through.

        Raises RequestError where it cannot be followed any further.
        """
        self._wait(self)
        if self._matcher.is_error():
            raise RequestError(f"{TOO_MUCH}: {shorten(self._matcher.get_error())}")
        np.minimum(logits, self._row, out=logits)

    def find(self) -> None:
        """Consume what was chosen, and find what may come next. On the thread that follows."""
        if self.chosen is not None:
            self._matcher.consume_token(self.chosen)
        self._matcher.unsafe_compute_mask_ptr(int(self._bits.ctypes.data), self._bits.nbytes)
        np.take(_CEILINGS, self._bytes, axis=0, out=self._ceiling, mode="clip")
        self.ended, self.found = self._matcher.is_stopped(), True


class _Batch:
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
        self._path, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(ends)
        self._read: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: list[TokenMask] = []
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._pid = os.getpid()

    def read(self, grammar: str) -> Future[LLMatcher]:
        """Return the future of a grammar as it is followed, which is copied for each request.

        It raises RequestError where llguidance does not take grammar or tokenizer.
        """
        with self._lock:
            found = self._read.get(grammar)
            if found is None:
                found = self._read[grammar] = self._thread(READER).submit(self._compile, grammar)
                while len(self._read) > KEPT:
                    self._read.popitem(last=False)
            self._read.move_to_end(grammar)
            return found

    # ---- on the engine's thread ----

    def open(self, grammar: str) -> TokenMask:
        """Return the mask of a new request; waits for a grammar that is still being read."""
        matcher = self.read(grammar).result().deep_copy()
        mask = TokenMask(matcher, self._vocab_size, self._wait)
        self.follow([mask])
        return mask

    def follow(self, masks: Sequence[TokenMask]) -> None:
        """Have found what may follow the tokens that were chosen; return at once."""
        self._under_way = [*(mask for mask in self._under_way if not mask.found), *masks]
        _Batch(masks, self._thread(FOLLOWER))

    def _wait(self, mask: TokenMask) -> None:
        """Return once a mask has been found; RequestError where the thread has got stuck in it."""
        while mask.batch is not None:
            try:
                mask.batch.done.result(PATIENCE)
                return
            except TimeoutError:
                self._leave_stuck()
        raise RequestError(TOO_MUCH)

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
    def _tokenizer(self) -> LLTokenizer:
        """The model's tokens as a tree, which all grammars share."""
        import llguidance  # noqa: PLC0415 - most engines follow no grammar

        if self._path is None:
            raise RequestError("the model has no tokenizer, so that no form can be asked for")
        try:
            return llguidance.LLTokenizer(
                str(self._path), n_vocab=self._vocab_size, eos_token=self._ends
            )
        except Exception as error:  # the library raises what comes
            raise RequestError(
                f"this model's tokenizer can follow no form of an answer: {error}"
            ) from None

    def _compile(self, grammar: str) -> LLMatcher:
        import llguidance  # noqa: PLC0415

        found = llguidance.LLMatcher(self._tokenizer, grammar, limits=make_limits(), log_level=0)
        if found.is_error():
            said = shorten(found.get_error())
            raise RequestError(f"the form of the answer cannot be followed: {said}")
        found.compute_bitmask()  # what copies share of it is found once
        return found
