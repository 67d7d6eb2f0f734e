from __future__ import annotations

import pytest

from dovetail.codegen.targets import DEVICE_TARGETS
from tests.codegen.kernels.harness import (
    DISTINCT,
    GPU,
    NATIVE,
    Runner,
    interpreted_runner,
    native_runner,
)

ALL_DISTINCT = [*DISTINCT, *DEVICE_TARGETS]
BOTH = [("native", name) for name in NATIVE] + [("interpreted", name) for name in ALL_DISTINCT]
MAKERS = {"native": native_runner, "interpreted": interpreted_runner}


@pytest.fixture(scope="session", params=NATIVE)
def native(request: pytest.FixtureRequest) -> Runner:
    """Compiled kernels, for each target this machine runs."""
    return native_runner(request.param)


@pytest.fixture(scope="session", params=ALL_DISTINCT)
def interpreted(request: pytest.FixtureRequest) -> Runner:
    """Interpreted kernels, for every target."""
    return interpreted_runner(request.param)


@pytest.fixture(scope="session", params=BOTH, ids="-".join)
def any_runner(request: pytest.FixtureRequest) -> Runner:
    """Both of the above: for shapes small enough to interpret."""
    kind, name = request.param
    return MAKERS[kind](name)


@pytest.fixture(scope="session", params=["warp", GPU])
def cuda(request: pytest.FixtureRequest) -> Runner:
    """The target cuda as plain C++, and on a GPU."""
    if request.param == GPU and GPU not in NATIVE:
        pytest.skip("no NVIDIA GPU is at hand")
    return native_runner({"warp": "cuda"}.get(request.param, GPU))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave prefill attention out on devices: its arrays exceed the shared memory of a block."""

    def fits(item: pytest.Item) -> bool:
        params = getattr(item, "callspec", None)
        runner = params.params.get("native", params.params.get("interpreted")) if params else None
        return "prefill" not in item.nodeid or runner not in (*DEVICE_TARGETS, GPU)

    dropped = [item for item in items if not fits(item)]
    items[:] = [item for item in items if fits(item)]
    config.hook.pytest_deselected(items=dropped)
