"""Random quantised weights for tests."""

import numpy as np

from dovetail.ir.block_format import SUPER, BlockFormat, Blocks


def random_blocks(form: BlockFormat, n: int, k: int, seed: int = 0) -> Blocks:
    """Codes and scales [n][k], all codes and signs of scales among them."""
    rng = np.random.default_rng((seed, n, k, form.bits))
    count = k // form.block
    shape = (n, k // SUPER if form.nested else count)
    codes = rng.integers(0, 1 << form.bits, (n, k), dtype=np.uint8)
    scales, minimums = ((rng.standard_normal(shape) / 16).astype(np.float16) for _ in range(2))
    steps, lows = (rng.integers(-128, 128, (n, count)).astype(np.int8) for _ in range(2))
    return Blocks(
        codes=codes,
        scales=scales,
        minimums=minimums if form.minimum else None,
        steps=steps if form.nested else None,
        lows=lows if form.nested and form.minimum else None,
    )


def round_activations(a: np.ndarray) -> np.ndarray:
    """float32 [m][k] as kernels see it: int8 of one scale for each 32 values."""
    groups = a.reshape(len(a), -1, 32)
    most = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    return (np.rint(groups * inverse) * (most / np.float32(127))).reshape(a.shape)
