"""Exact match: two short answers go in, whether they say the same comes out."""

from __future__ import annotations

import string


def normalize(answer: str) -> str:
    """Return an answer as exact match compares it: lower case, no punctuation, no articles."""
    words = answer.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def exact_match(answer: str, wanted: str) -> bool:
    """Tell whether two short answers are the same."""
    return normalize(answer) == normalize(wanted)
