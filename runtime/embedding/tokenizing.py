"""Texts to token ids on threads of their own: an event loop never waits for a tokenizer.

In: texts. Out: ids of each, in order, or the error of the first text that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dovetail.ir.errors import RequestError
from dovetail.runtime.embedding.instance import Ids

Tokenize = Callable[[Sequence[str]], Sequence[Sequence[int] | Ids]]
"""Ids of each text with the model's special tokens, cut to its greatest length."""
CHUNK = 64
"""Texts that one thread takes at a time."""


class TokenPool:
    """A tokenizer on several threads; it must release Python's lock to gain by them."""

    def __init__(self, tokenize: Tokenize, threads: int = 2) -> None:
        self._tokenize = tokenize
        self._pool = ThreadPoolExecutor(threads, "dovetail-tokenize")

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text.

        Raises:
            RequestError: a text is no text, or has no UTF-8 form.
        """
        for index, text in enumerate(texts):
            check_text(index, text)
        parts = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
        return [
            np.asarray(ids, np.int32)
            for part in self._pool.map(self._tokenize, parts)
            for ids in part
        ]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def check_text(index: int, text: object) -> None:
    """Raise RequestError where a text is of another type, or has no UTF-8 form."""
    if not isinstance(text, str):
        raise RequestError(f"text {index} is of type {type(text).__name__}; give a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text {index} is not valid Unicode: half a surrogate pair at {error.start}"
        ) from None
