"""The GPUs of the machine that tests run on."""

from __future__ import annotations


def count_devices() -> int:
    """Return how many GPUs torch sees, 0 without torch or a driver."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()
