"""Call a kernel of your own on numpy arrays, without a copy.

    dovetail kernel build examples/saxpy.dk -o saxpy
    python examples/call_kernel.py saxpy

Needs `pip install -e '.[ffi]'`. Tensors of torch or JAX are passed in the same way.
"""

from __future__ import annotations

import sys

import numpy as np

import dovetail


def main(library: str) -> None:
    """Run saxpy on vectors of a length that no vector register divides."""
    saxpy = dovetail.kernels(library)["saxpy"]  # its parameters: those of saxpy.dk
    x = np.arange(1003, dtype=np.float32)
    y = np.ones(1003, dtype=np.float32)
    expected = 2 * x + y
    saxpy(x.size, 2.0, x, y)
    print("largest error:", np.abs(y - expected).max())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
