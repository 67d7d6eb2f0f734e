from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runtime.accel import engines


@pytest.fixture
def two_pools(accelerator: str) -> engines.TwoPools:
    """Return `engines.two_pools` on a device."""
    from tests.runtime.accel import engines  # its tests alone need torch

    return partial(engines.two_pools, device=accelerator)
