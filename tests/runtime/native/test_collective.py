"""All-reduce through shared memory, in real processes: bits, sizes, many ranks, death of a rank."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import CapacityError, RankError
from dovetail.runtime.machine import abi
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.native.collective import Communicator, comm_bytes
from tests.runtime.groups import Group, named_memory

F32 = npt.NDArray[np.float32]
SIZES = (1, 15, 16, 17, 1023, 1024, 1025, 8191, 8193, 32769, 131073, 1 << 18)


def values(rank: int, size: int) -> F32:
    """Values whose float32 sum depends on the order of the ranks."""
    return np.random.default_rng(1000 * rank + size).standard_normal(size).astype(np.float32)


def ordered_sum(ranks: int, size: int) -> F32:
    total = values(0, size)
    for rank in range(1, ranks):
        total = total + values(rank, size)
    return total


def check_sizes(comm: Communicator, sizes: Sequence[int]) -> None:
    for size in sizes:
        for _ in range(2):
            x = values(comm.rank, size)
            comm.all_reduce(x)
            np.testing.assert_array_equal(x, ordered_sum(comm.ranks, size))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16])
def test_sums_have_the_bits_of_the_sum_in_order_of_ranks(toy_library: Path, ranks: int) -> None:
    sizes = SIZES if ranks <= 4 else SIZES[:-1]
    group = Group(toy_library, ranks, lambda comm: check_sizes(comm, sizes), spin=ranks <= 2)
    assert group.wait() == [0] * ranks


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(2, 6), st.lists(st.integers(0, 90_000), min_size=1, max_size=6))
def test_any_sizes_in_any_order(toy_library: Path, ranks: int, sizes: list[int]) -> None:
    group = Group(toy_library, ranks, lambda comm: check_sizes(comm, sizes))
    assert group.wait() == [0] * ranks


@pytest.mark.parametrize("threads", [(1, 1), (2, 2), (3, 1)])
def test_threads_share_strided_rows(toy_library: Path, threads: tuple[int, int]) -> None:
    rows, columns, stride, most = 37, 999, 1008, 3

    def work(comm: Communicator) -> None:
        c = abi.declare(ctypes.CDLL(str(toy_library)))
        x = np.full((rows, stride), np.float32(7))
        x[:, :columns] = values(comm.rank, rows * columns).reshape(rows, columns)
        nth = threads[comm.rank]

        def call(tid: int) -> None:
            assert c.dt_all_reduce(comm.handle, x.ctypes.data, rows, columns, stride, tid, nth) == 0

        workers = [threading.Thread(target=call, args=(tid,)) for tid in range(nth)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        wanted = ordered_sum(2, rows * columns).reshape(rows, columns)
        np.testing.assert_array_equal(x[:, :columns], wanted)
        assert (x[:, columns:] == 7).all()

    assert Group(toy_library, 2, work, threads=most).wait() == [0, 0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_columns_of_all_ranks_are_gathered(toy_library: Path, ranks: int) -> None:
    rows, stride = 37, 208

    def work(comm: Communicator) -> None:
        c = abi.declare(ctypes.CDLL(str(toy_library)))
        for columns, units, size in ((192, 6, 32), (203, 13, 16), (stride, 13, 16), (2, 1, 16)):
            whole = values(9, rows * stride).reshape(rows, stride)
            x = values(comm.rank, rows * stride).reshape(rows, stride)
            rest = x[:, columns:].copy()
            own = slice(*(units * r // ranks * size for r in (comm.rank, comm.rank + 1)))
            x[:, own] = whole[:, own]
            x[:, columns:] = rest
            shape = (rows, columns, stride, units, size)
            call = (ctypes.c_void_p(comm.handle), ctypes.c_void_p(x.ctypes.data))
            assert c.dt_all_gather(*call, *map(ctypes.c_int64, (*shape, 0, 1))) == 0
            np.testing.assert_array_equal(x[:, :columns], whole[:, :columns])
            np.testing.assert_array_equal(x[:, columns:], rest)

    assert Group(toy_library, ranks, work, threads=2).wait() == [0] * ranks


def test_a_death_is_noticed_within_two_seconds() -> None:
    """A rank that waits looks around every slice; then the others, in their next slices, know."""
    source = files("dovetail.codegen").joinpath("templates/collective.c").read_text()
    (slice_ns,) = re.findall(r"#define DT_SLEEP_NS (\d+)", source)
    assert "{0, DT_SLEEP_NS}" in source and 2 * int(slice_ns) <= 2e9 / 10  # leaving it time to run


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_an_error_for_all_others(
    toy_library: Path, ranks: int, victim: int
) -> None:
    read, write = os.pipe()

    def work(comm: Communicator) -> None:
        x = values(comm.rank, 40_000)
        comm.all_reduce(x)
        os.write(write, b"x")
        with pytest.raises(RankError):
            while True:
                comm.all_reduce(x)
        assert comm.failed
        with pytest.raises(RankError):  # at once, for good
            comm.all_reduce(x)

    group = Group(toy_library, ranks, work)
    for _ in range(ranks):
        os.read(read, 1)
    group.kill(victim)
    wanted = [0] * ranks
    wanted[victim] = -9
    assert group.wait() == wanted
    os.close(read)
    os.close(write)


def test_a_group_that_is_ended_gives_up_waiting(toy_library: Path) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.fail()
            return
        with pytest.raises(RankError):
            comm.all_reduce(values(1, 10))

    assert Group(toy_library, 3, work).wait() == [0, 0, 0]


def test_memory_and_descriptors_are_given_back(toy_library: Path) -> None:
    def litter() -> tuple[int, set[str]]:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), named_memory([os.getpid()])

    c = abi.declare(ctypes.CDLL(str(toy_library)))

    def use() -> None:
        shared = SharedMemory.create(comm_bytes(c, 1, 1))
        comm = Communicator(c, shared.bytes, rank=0, ranks=1, threads=1, spin=0)
        comm.all_reduce(values(0, 5))
        shared.close()
        assert Group(toy_library, 2, lambda comm: comm.all_reduce(values(0, 9))).wait() == [0, 0]

    use()  # what a process opens once stays open
    before = litter()
    for _ in range(3):
        use()
    assert litter() == before


def test_impossible_groups_are_refused(toy_library: Path) -> None:
    c = abi.declare(ctypes.CDLL(str(toy_library)))
    with pytest.raises(CapacityError, match="300 processes"):
        comm_bytes(c, 300, 1)
    shared = SharedMemory.create(comm_bytes(c, 2, 1))
    with pytest.raises(CapacityError, match="rank 2 of 2"):
        Communicator(c, shared.bytes, rank=2, ranks=2, threads=1, spin=0)
    with pytest.raises(CapacityError, match="shared memory"):
        SharedMemory.create(1 << 62)
