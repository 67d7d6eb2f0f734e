"""Sums and gathers over gloo against the same in numpy; ranks that leave or never answer.

The ranks are threads: each has a process group of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from dovetail.ir.errors import RankError
from dovetail.runtime.accel import collective as torch_collective
from dovetail.runtime.accel.collective import TorchCollective, open_store
from dovetail.runtime.native.collective import own_columns

HERE = "127.0.0.1"
T = TypeVar("T")


def run_ranks(
    ranks: int,
    work: Callable[[TorchCollective], T],
    lost: Callable[[], bool] = lambda: False,
    seconds: float = 60.0,
) -> list[T]:
    server = open_store(HERE, 0, server=True, seconds=seconds)

    def be(rank: int) -> T:
        store = (
            server if rank == 0 else open_store(HERE, server.port, server=False, seconds=seconds)
        )
        made = TorchCollective(
            "gloo", store, rank=rank, ranks=ranks, host=HERE, seconds=seconds, lost=lost
        )
        try:
            return work(made)
        finally:
            made.fail()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(be, range(ranks)))


def values(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


def sum_up(group: TorchCollective) -> None:
    group.all_reduce(torch.from_numpy(values(0, 3)))


def gather(group: TorchCollective) -> None:
    group.all_gather(torch.from_numpy(values(0, 2, 8)), 2, 4)


class Torn:
    """A group as NCCL's is when it has been aborted: it refuses at once."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def allreduce(self, _: Any) -> None:
        raise dist.DistBackendError("the communicator was aborted")

    def allgather(self, *_: Any) -> None:
        raise dist.DistBackendError("the communicator was aborted")

    def abort(self) -> None:
        self.left.set()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sums_are_those_of_float64_and_alike_everywhere(ranks: int) -> None:
    shapes = [(5,), (1,), (0,), (7, 33), (64, 128)]

    def work(group: TorchCollective) -> list[np.ndarray]:
        found = []
        for shape in shapes:
            x = values(group.rank, *shape)
            group.all_reduce(torch.from_numpy(x))
            found.append(x)
        wide = values(group.rank, 6, 40)
        group.all_reduce(torch.from_numpy(wide)[:, :30])  # rows apart
        return [*found, wide]

    per_rank = run_ranks(ranks, work)
    for place, shape in enumerate(shapes):
        wanted = sum(values(rank, *shape).astype(np.float64) for rank in range(ranks))
        for found in per_rank:
            np.testing.assert_allclose(found[place], wanted, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(found[place], per_rank[0][place])
    wide = sum(values(rank, 6, 40).astype(np.float64) for rank in range(ranks))
    for rank, found in enumerate(per_rank):
        np.testing.assert_allclose(found[-1][:, :30], wide[:, :30], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(found[-1][:, 30:], values(rank, 6, 40)[:, 30:])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_columns_of_all_ranks_are_gathered(ranks: int) -> None:
    """Units that do not go into the ranks, a last one cut short, fewer units than ranks."""
    cases = [(192, 6, 32), (203, 13, 16), (101, 7, 16), (2, 1, 16)]

    def work(group: TorchCollective) -> None:
        for columns, units, size in cases:
            whole = values(9, 5, columns)
            x = values(group.rank, 5, columns + 3)
            rest = x[:, columns:].copy()
            own = own_columns(group.ranks, units, size, columns)[group.rank]
            x[:, own.start : own.stop] = whole[:, own.start : own.stop]
            group.all_gather(torch.from_numpy(x)[:, :columns], units, size)
            np.testing.assert_array_equal(x[:, :columns], whole)
            np.testing.assert_array_equal(x[:, columns:], rest)

    run_ranks(ranks, work)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_leaves_is_an_error_for_all_others(victim: int) -> None:
    def work(group: TorchCollective) -> bool:
        x = torch.from_numpy(values(group.rank, 1000))
        group.all_reduce(x)
        if group.rank == victim:
            group.fail()
        with pytest.raises(RankError):
            for _ in range(100):
                group.all_reduce(x)
        with pytest.raises(RankError):  # at once, for good
            group.all_reduce(x)
        return group.failed

    assert run_ranks(3, work) == [True] * 3


def test_a_rank_that_is_silent_is_given_up_when_its_machine_is_gone() -> None:
    gone, ended = threading.Event(), threading.Event()

    def work(group: TorchCollective) -> bool:
        if group.rank == 1:
            return ended.wait(60)
        gone.set()
        with pytest.raises(RankError, match="rank 0"):
            group.all_reduce(torch.from_numpy(values(0, 10)))
        ended.set()
        return group.failed

    assert run_ranks(2, work, gone.is_set) == [True, True]


def test_tensors_are_summed_and_gathered_where_they_are() -> None:
    """Rows that lie apart, as on a device; what lies between them stays."""

    def work(group: TorchCollective) -> None:
        memory = torch.from_numpy(values(group.rank, 6, 40))
        rest = memory[:, 30:].clone()
        group.all_reduce(memory[:, :30])
        wanted = sum(values(rank, 6, 40)[:, :30].astype(np.float64) for rank in range(2))
        np.testing.assert_allclose(memory[:, :30].numpy(), wanted, rtol=0, atol=1e-5)
        group.all_gather(memory[:, :30], 2, 15)
        assert torch.equal(memory[:, 30:], rest)

    run_ranks(2, work)


def test_a_lost_rank_is_seen_without_a_sum_where_sums_run_behind_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_collective, "_BEHIND", {"gloo"})
    failed = threading.Event()
    fail = TorchCollective.fail

    def follow(group: TorchCollective) -> None:
        fail(group)
        failed.set()

    monkeypatch.setattr(TorchCollective, "fail", follow)
    assert run_ranks(1, lambda group: failed.wait(60) and group.failed, lambda: True) == [True]


@pytest.mark.parametrize("exchange", [sum_up, gather])
def test_a_group_given_up_by_another_thread_just_before_a_sum_is_an_error(
    monkeypatch: pytest.MonkeyPatch, exchange: Callable[[TorchCollective], None]
) -> None:
    looked = TorchCollective.failed.fget
    assert looked is not None

    def look(group: TorchCollective) -> bool:
        found: bool = looked(group)
        thread = threading.Thread(target=group.fail)
        thread.start()
        thread.join()
        return found

    def work(group: TorchCollective) -> None:
        with monkeypatch.context() as racing:
            racing.setattr(TorchCollective, "failed", property(look))
            with pytest.raises(RankError, match="has ended"):
                exchange(group)

    run_ranks(1, work)


@pytest.mark.parametrize("exchange", [sum_up, gather])
def test_a_backend_that_refuses_work_has_failed(
    monkeypatch: pytest.MonkeyPatch, exchange: Callable[[TorchCollective], None]
) -> None:
    torn = Torn()
    monkeypatch.setitem(torch_collective._GROUPS, "gloo", lambda *_: torn)

    def work(group: TorchCollective) -> bool:
        with pytest.raises(RankError, match=r"failed at rank 0 .*aborted"):
            exchange(group)
        with pytest.raises(RankError, match="has ended"):
            exchange(group)
        return group.failed

    assert run_ranks(1, work) == [True]
    assert torn.left.wait(60)  # a thread of its own ends the group


def test_a_store_that_is_not_there_is_one_sentence() -> None:
    server = open_store(HERE, 0, server=True, seconds=5)
    port = server.port
    del server
    with pytest.raises(RankError, match="cannot find each other"):
        open_store(HERE, port, server=False, seconds=0.2)
