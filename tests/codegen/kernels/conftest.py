from __future__ import annotations

import pytest

from dovetail.codegen.targets import TARGETS
from tests.codegen.kernels.harness import NATIVE, Runner, interpreted_runner, native_runner

BOTH = [("native", name) for name in NATIVE] + [("interpreted", name) for name in TARGETS]
MAKERS = {"native": native_runner, "interpreted": interpreted_runner}


@pytest.fixture(scope="session", params=NATIVE)
def native(request: pytest.FixtureRequest) -> Runner:
    """Compiled kernels, for each target this machine runs."""
    return native_runner(request.param)


@pytest.fixture(scope="session", params=list(TARGETS))
def interpreted(request: pytest.FixtureRequest) -> Runner:
    """Interpreted kernels, for every target."""
    return interpreted_runner(request.param)


@pytest.fixture(scope="session", params=BOTH, ids="-".join)
def any_runner(request: pytest.FixtureRequest) -> Runner:
    """Both of the above: for shapes small enough to interpret."""
    kind, name = request.param
    return MAKERS[kind](name)
