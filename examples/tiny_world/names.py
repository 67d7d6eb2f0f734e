"""Syllable-built names: a seeded random source goes in, names nobody has met come out."""

from __future__ import annotations

import random
from collections.abc import Callable

ONSETS = tuple("b br c d dr f g gr h j k l m n p r s st t tr v z".split())
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("l", "n", "r", "s", "m", "k")
OPEN = tuple(onset + vowel for onset in ONSETS for vowel in VOWELS)
CLOSED = tuple(syllable + CODAS[i % len(CODAS)] for i, syllable in enumerate(OPEN))

COUNTRY_ENDS = ("via", "land", "stan", "mark", "nia")
CITY_ENDS = ("burg", "ton", "port", "mere", "holm", "ford")
LANGUAGE_ENDS = ("ish", "ese", "ic")
FAMILY_ENDS = ("son", "ley", "sky", "ez", "ini", "man")
COMPANY_WORDS = ("Works", "Trading", "Labs", "Brothers", "Mills")
TITLE_NOUNS = tuple(
    """
    Harbor Garden Tower Road Bridge Forest Island Mirror Clock Song Letter Window Market
    Mountain Orchard Lantern Voyage Crown Shore Library Station Valley Feather Compass Meadow
    Storm Castle Winter
    """.split()
)


def _stem(rng: random.Random) -> str:
    """Return one or two syllables, the last one closed."""
    return rng.choice(("", rng.choice(OPEN))) + rng.choice(CLOSED)


def _country(rng: random.Random) -> str:
    return (rng.choice(OPEN) + rng.choice(CLOSED) + rng.choice(COUNTRY_ENDS)).capitalize()


def _city(rng: random.Random) -> str:
    return (rng.choice(OPEN) + rng.choice(CLOSED) + rng.choice(CITY_ENDS)).capitalize()


def _river(rng: random.Random) -> str:
    return (rng.choice(OPEN) + rng.choice(CLOSED)).capitalize() + " River"


def _person(rng: random.Random) -> str:
    given = rng.choice(OPEN) + rng.choice(OPEN)
    family = _stem(rng) + rng.choice(FAMILY_ENDS)
    return f"{given.capitalize()} {family.capitalize()}"


def _company(rng: random.Random) -> str:
    return f"{(rng.choice(OPEN) + _stem(rng)).capitalize()} {rng.choice(COMPANY_WORDS)}"


def _book(rng: random.Random) -> str:
    owner = (rng.choice(OPEN) + rng.choice(CLOSED)).capitalize()
    return f"The {owner} {rng.choice(TITLE_NOUNS)}"


def _language(rng: random.Random) -> str:
    return (_stem(rng) + rng.choice(LANGUAGE_ENDS)).capitalize()


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "country": _country,
    "city": _city,
    "river": _river,
    "person": _person,
    "company": _company,
    "book": _book,
    "language": _language,
}


class NameMaker:
    """Hands out names, none twice and none of `taken`."""

    def __init__(self, rng: random.Random, taken: frozenset[str] = frozenset()) -> None:
        self._rng = rng
        self._taken = set(taken)

    def make(self, kind: str) -> str:
        """Return a new name for an entity of `kind`, a key of `MAKERS`."""
        while (name := MAKERS[kind](self._rng)) in self._taken:
            continue
        self._taken.add(name)
        return name
