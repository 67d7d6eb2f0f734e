"""Where the end of a growing text has stood before: a suffix automaton over token ids.

In: tokens, in order. Out: the longest end of the text that also ends earlier, and what followed
there. Linear in the tokens, in time and memory (Blumer et al. 1985).
"""

from __future__ import annotations

from collections.abc import Sequence


class SuffixAutomaton:
    """A state stands for the parts of the text that end at the same places.

    Of each: the states that tokens lead to; the tokens of its longest part; the state of the
    longest end of its parts that also ends elsewhere; the place behind the first time it occurs.
    """

    __slots__ = ("_behind", "_edges", "_last", "_lengths", "_links", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._edges: list[dict[int, int]] = [{}]
        self._lengths, self._links, self._behind = [0], [-1], [0]
        self._last = 0  # the state of the whole text

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        edges, links = self._edges, self._links
        for token in tokens:
            self.tokens.append(token)
            state, new = self._last, len(edges)
            self._add({}, len(self.tokens), 0, len(self.tokens))
            while state >= 0 and token not in edges[state]:
                edges[state][token] = new
                state = links[state]
            if state >= 0:
                links[new] = self._split(state, token)
            self._last = new

    def _split(self, state: int, token: int) -> int:
        """Return the state of the longest part of `state` followed by `token`, of no longer one."""
        edges, links, lengths = self._edges, self._links, self._lengths
        longer = edges[state][token]
        if lengths[longer] == lengths[state] + 1:
            return longer
        part = len(edges)
        self._add(edges[longer].copy(), lengths[state] + 1, links[longer], self._behind[longer])
        links[longer] = part
        while state >= 0 and edges[state].get(token) == longer:
            edges[state][token] = part
            state = links[state]
        return part

    def _add(self, edges: dict[int, int], length: int, link: int, behind: int) -> None:
        self._edges.append(edges)
        self._lengths.append(length)
        self._links.append(link)
        self._behind.append(behind)

    def find(self) -> tuple[int, int]:
        """Return how many last tokens also stand earlier, and the place behind their first time."""
        state = self._links[self._last]
        return (0, 0) if state <= 0 else (self._lengths[state], self._behind[state])

    def read(self, place: int, most: int) -> list[int]:
        """Return `most` tokens from `place` on; behind its end the text goes on as there."""
        found = self.tokens[place : place + most]
        period = len(self.tokens) - place
        while len(found) < most:
            found.append(found[len(found) - period])
        return found
