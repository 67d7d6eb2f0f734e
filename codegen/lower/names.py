"""Fresh names: one allocator per lowered kernel keeps inlined and unrolled variables apart."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.ir.high.ops import REAL_FUNCTIONS, REAL_PAIRS

C_WORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if
    inline int long register restrict return short signed sizeof static struct switch typedef
    union unsigned void volatile while asm typeof main NULL INFINITY NAN y0 y1 yn j0 j1 jn gamma
    signgam index time
    and asm bool catch class constexpr delete explicit export false friend mutable namespace new
    noexcept not nullptr operator or private protected public template this throw true try
    typeid typename using virtual wchar_t xor gridDim blockDim blockIdx threadIdx warpSize
    """.split()
) | {f"{name}{f}" for name in (*REAL_FUNCTIONS, *REAL_PAIRS, "fabs") for f in ("", "f")}
"""Names that generated C variables never carry: keywords of C and C++, and what
the headers in use declare."""


class Names:
    """Hands out names that nothing else in the kernel uses."""

    def __init__(self, used: Iterable[str]) -> None:
        self._used = {*used, *C_WORDS}
        self._next: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """Return `base` if it is free, else `base_1`, `base_2` ..."""
        name, number = base, self._next.get(base, 0)
        while name in self._used:
            number += 1
            name = f"{base}_{number}"
        self._next[base] = number
        self._used.add(name)
        return name
