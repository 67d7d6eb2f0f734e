"""The NVIDIA GPUs of the machine that tests run on."""

from __future__ import annotations

from dovetail.ir.errors import SpecError
from dovetail.runtime.cuda import CudaError, Driver


def count_devices() -> int:
    """Return how many GPUs this process may use, 0 without a driver."""
    try:
        return Driver().integer("cuDeviceGetCount")
    except (SpecError, CudaError):
        return 0
