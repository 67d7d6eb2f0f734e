"""Code books: the 16 values that codes of 4 bits stand for, where they are no row of integers.

The kernels look them up (`weights_codes.dk` has the same numbers): as whole numbers where
activations are integers, to 256ths where they are floats. A block's scale is for such values.
"""

from __future__ import annotations

import numpy as np

from dovetail.ir.dtypes import Array

NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Of bitsandbytes: places of a normal distribution of which each holds as much."""
FP4 = tuple(sign * v / 192 for sign in (1, -1) for v in (0, 1, 128, 192, 64, 96, 32, 48))
"""Of bitsandbytes: a sign, 2 bits of exponent, one of fraction, all less than 1."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of llama.cpp's IQ4_NL and IQ4_XS."""
E2M1 = tuple(sign * v for sign in (1, -1) for v in (0, 1, 2, 3, 4, 6, 8, 12))
"""Of MXFP4, twice: a sign, 2 bits of exponent, one of fraction."""
TIMES = {"nf4": 112, "fp4": 120}
"""What the largest value of a book of fractions becomes: the whole numbers are nearest there."""


FRACTIONS: dict[str, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}


def _sized(book: str) -> tuple[float, ...]:
    return tuple(round(value * 256 * TIMES[book]) / 256 for value in FRACTIONS[book])


BOOKS: dict[str, Array] = {
    name: np.array(values, np.float32)
    for name, values in {
        **{name: _sized(name) for name in FRACTIONS},
        "iq4": IQ4,
        "mx4": E2M1,
    }.items()
}
"""Name, as formats have it, to float32 [16], in the order of the kernels' numbers from 1 on."""


def book_number(name: str) -> int:
    """Return the kernels' number of a code book, 0 for none."""
    return [*BOOKS].index(name) + 1 if name else 0
