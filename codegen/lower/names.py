"""Fresh names: one allocator per lowered kernel keeps inlined and unrolled variables apart."""

from __future__ import annotations

from collections.abc import Iterable

C_WORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if
    inline int long register restrict return short signed sizeof static struct switch typedef
    union unsigned void volatile while asm typeof main NULL INFINITY NAN expf exp logf log sqrtf
    sqrt cosf cos sinf sin tanhf tanh floorf floor fabsf fabs y0 y1 yn j0 j1 jn gamma signgam
    index time
    and asm bool catch class constexpr delete explicit export false friend mutable namespace new
    noexcept not nullptr operator or private protected public template this throw true try
    typeid typename using virtual wchar_t xor gridDim blockDim blockIdx threadIdx warpSize
    """.split()
)
"""Names that generated C variables never carry: keywords of C and C++, and what
the headers in use declare."""


class Names:
    """Hands out names that nothing else in the kernel uses."""

    def __init__(self, used: Iterable[str]) -> None:
        self._used = {*used, *C_WORDS}
        self._next: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """Return `base` if it is free, else `base_1`, `base_2` ..."""
        if base not in self._used:
            self._used.add(base)
            return base
        number = self._next.get(base, 0)
        while True:
            number += 1
            name = f"{base}_{number}"
            if name not in self._used:
                break
        self._next[base] = number
        self._used.add(name)
        return name
