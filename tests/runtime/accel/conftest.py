from __future__ import annotations

from functools import partial

import pytest

from tests.runtime.accel import engines


@pytest.fixture
def two_pools(accelerator: str) -> engines.TwoPools:
    """Return `engines.two_pools` on a device."""
    return partial(engines.two_pools, device=accelerator)
