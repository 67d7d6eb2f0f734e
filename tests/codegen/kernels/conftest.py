from __future__ import annotations

import pytest

from tests.codegen.kernels.harness import (
    DISTINCT,
    NATIVE,
    Runner,
    gpu_runner,
    interpreted_runner,
    native_runner,
    warp_runner,
)

BOTH = [("native", name) for name in NATIVE] + [("interpreted", name) for name in DISTINCT]
MAKERS = {"native": native_runner, "interpreted": interpreted_runner}


@pytest.fixture(scope="session", params=NATIVE)
def native(request: pytest.FixtureRequest) -> Runner:
    """Compiled kernels, for each target this machine runs."""
    return native_runner(request.param)


@pytest.fixture(scope="session", params=list(DISTINCT))
def interpreted(request: pytest.FixtureRequest) -> Runner:
    """Interpreted kernels, for every target."""
    return interpreted_runner(request.param)


@pytest.fixture(scope="session", params=BOTH, ids="-".join)
def any_runner(request: pytest.FixtureRequest) -> Runner:
    """Both of the above: for shapes small enough to interpret."""
    kind, name = request.param
    return MAKERS[kind](name)


@pytest.fixture(scope="session", params=["warp", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> Runner:
    """The target cuda as plain C++, and on a GPU."""
    if request.param == "warp":
        return warp_runner()
    return gpu_runner()
