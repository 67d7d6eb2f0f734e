"""Random products under random schedules against float64, with K or N of 1 and primes."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.compiler.rules.schedules import LINEAR, SILU
from dovetail.ir.schedule import ORDERS
from tests.codegen.kernels.gemm_problem import NATIVE, Problem, kernel_names
from tests.shares import pick

ODD_SIZES = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 32, 33, 61, 97, 127, 128, 131)
PREFETCHES = (0, 64, 1024, 4096, -1, -256)
DEFAULT_CASES, ALL_CASES = 100, 2000


KERNELS = [*kernel_names(LINEAR), *kernel_names(SILU)]
DEFAULT_KERNELS = [*pick(kernel_names(LINEAR), 3), *pick(kernel_names(SILU), 8)]
"""Those that the default tests of edges and schedules build, too."""


def fuzz(kernels: list[tuple[str, str]], count: int, seed: int) -> None:
    """Check `count` random products; a failure names its problem and schedule."""
    random = np.random.default_rng(seed)

    def one_of(values):
        return values[random.integers(len(values))]

    def size(largest: int) -> int:
        if random.random() < 0.6:
            return int(one_of([s for s in ODD_SIZES if s <= largest]))
        return int(random.integers(1, largest + 1))

    for _ in range(count):
        target, name = one_of(kernels)
        _, kind, dtype, _ = name.split("_")
        extras = {"bias": bool(random.integers(2))}
        if kind == LINEAR:
            extras |= {"residual": bool(random.integers(2)), "in_place": bool(random.integers(2))}
        extras["in_place"] = extras.get("in_place", False) and extras["residual"]
        room = int(one_of((0, 1000, 1 << 16)))
        shape = (size(70), size(200), size(200), dtype)
        problem = Problem(*shape, kind, **extras, seed=int(random.integers(99)), partial_size=room)
        schedule = {
            "m_tile": int(random.integers(0, 18)),
            "block_m": int(one_of((0, 1, 5, 16, 64))),
            "block_n": int(one_of((0, 1, 2, 3))),
            "block_k": int(one_of((0, 1, 7, 16, 64))),
            "grid_m": int(random.integers(0, 4)),
            "grid_n": int(random.integers(0, 4)),
            "grid_k": int(one_of((0, 1, 1, 2, 3))),
            "prefetch": int(one_of(PREFETCHES)),
            "order": int(random.integers(len(ORDERS))),
        }
        threads = int(random.integers(1, 7))
        try:
            problem.check(target, name, threads, **schedule)
        except AssertionError as error:
            raise AssertionError(f"{name} {shape} {extras} {schedule} x{threads}") from error


def test_random_products() -> None:
    fuzz(DEFAULT_KERNELS, DEFAULT_CASES, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 2 + ALL_CASES // 500))
def test_two_thousand_random_products(seed: int) -> None:
    fuzz(KERNELS, 500, seed)


def test_the_fuzz_meets_every_native_target() -> None:
    assert {target for target, _ in DEFAULT_KERNELS} == set(NATIVE)
