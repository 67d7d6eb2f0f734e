"""Which GPU a number means: the same one for decoders, encoders and hot clusters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ASK = "import os; from dovetail.runtime.accel import device; print(os.environ['CUDA_DEVICE_ORDER'])"


@pytest.mark.parametrize("own", [None, "FASTEST_FIRST"])
def test_gpus_are_counted_by_bus_address_unless_a_user_says_otherwise(own: str | None) -> None:
    before = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_ORDER"}
    given = before | ({} if own is None else {"CUDA_DEVICE_ORDER": own})
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (own or "PCI_BUS_ID")
