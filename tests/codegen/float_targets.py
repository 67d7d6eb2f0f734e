"""Targets whose kernels of floats are another's: they differ in products of bytes alone.

Tests of float kernels leave them out; `test_targets.py` holds the table to the targets.
"""

from dovetail.codegen.targets import TARGETS

FLOATS_OF = {
    "x86-64-avx512vnni": "x86-64-avx512",
    "x86-64-avxvnni": "x86-64-avx2",
    "aarch64-dotprod": "aarch64-neon",
    "aarch64-i8mm": "aarch64-neon",
}
"""Target to the one with the same operations on floats."""
FLOAT_TARGETS = {name: target for name, target in TARGETS.items() if name not in FLOATS_OF}
