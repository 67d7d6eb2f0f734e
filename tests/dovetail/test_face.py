from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dovetail
from dovetail.ir import errors

KERNELS = """
import sys
import numpy as np
import dovetail

x = np.linspace(-2, 3, 2 * 40, dtype=np.float32).reshape(2, 40)
w, out = np.full(40, 1.5, np.float32), np.zeros((2, 40), np.float32)
dovetail.kernels(sys.argv[1])["rmsnorm"](2, 40, x, 40, w, 1e-5, out, 40, 0, 1)
exact = x / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + 1e-5) * 1.5
print(np.abs(out - exact).max())
"""


def test_every_public_name_resolves() -> None:
    for name in dovetail.__all__:
        assert getattr(dovetail, name) is not None
    assert set(dovetail.__all__) <= set(dir(dovetail))
    assert dovetail.SpecError is errors.SpecError


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'serve'"):
        dovetail.serve  # noqa: B018


def test_single_kernels_through_tvm_ffi(artifact: Path) -> None:
    """In a process of its own: importing tvm_ffi brings torch along."""
    command = [sys.executable, "-P", "-c", KERNELS, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5
