"""Syllable-built names: a seeded random source goes in, names nobody has met come out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Syllables:
    """What names are made of: open syllables end in a vowel, closed ones in a consonant."""

    open: tuple[str, ...] = OPEN
    closed: tuple[str, ...] = CLOSED

    def few(self, rng: random.Random, count: int) -> Syllables:
        """Return `count` syllables of each sort: names made of them look alike."""
        return Syllables(tuple(rng.sample(self.open, count)), tuple(rng.sample(self.closed, count)))


def _stem(rng: random.Random, of: Syllables) -> str:
    """Return one or two syllables, the last one closed."""
    return rng.choice(("", rng.choice(of.open))) + rng.choice(of.closed)


def _two(rng: random.Random, of: Syllables) -> str:
    return rng.choice(of.open) + rng.choice(of.closed)


def _country(rng: random.Random, of: Syllables) -> str:
    return (_two(rng, of) + rng.choice(COUNTRY_ENDS)).capitalize()


def _city(rng: random.Random, of: Syllables) -> str:
    return (_two(rng, of) + rng.choice(CITY_ENDS)).capitalize()


def _river(rng: random.Random, of: Syllables) -> str:
    return _two(rng, of).capitalize() + " River"


def _person(rng: random.Random, of: Syllables) -> str:
    given = rng.choice(of.open) + rng.choice(of.open)
    family = _stem(rng, of) + rng.choice(FAMILY_ENDS)
    return f"{given.capitalize()} {family.capitalize()}"


def _company(rng: random.Random, of: Syllables) -> str:
    stem = rng.choice(of.open) + _stem(rng, of)
    return f"{stem.capitalize()} {rng.choice(COMPANY_WORDS)}"


def _book(rng: random.Random, of: Syllables) -> str:
    return f"The {_two(rng, of).capitalize()} {rng.choice(TITLE_NOUNS)}"


def _language(rng: random.Random, of: Syllables) -> str:
    return (_stem(rng, of) + rng.choice(LANGUAGE_ENDS)).capitalize()


MAKERS: dict[str, Callable[[random.Random, Syllables], str]] = {
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

    def __init__(
        self,
        rng: random.Random,
        taken: frozenset[str] = frozenset(),
        syllables: Syllables | None = None,
    ) -> None:
        self._rng, self._syllables = rng, syllables or Syllables()
        self._taken = set(taken)

    def make(self, kind: str) -> str:
        """Return a new name for an entity of `kind`, a key of `MAKERS`."""
        while (name := MAKERS[kind](self._rng, self._syllables)) in self._taken:
            continue
        self._taken.add(name)
        return name
