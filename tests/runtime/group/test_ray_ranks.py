"""Ranks on the nodes of a real Ray cluster on this machine, one of which dies while they run."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dovetail[ray]'")
pytest.importorskip("torch", reason="torch is not installed: pip install 'dovetail[gpu]'")

from dovetail.ir.errors import RankError, SpecError
from dovetail.runtime.app import App, load
from dovetail.runtime.engine.options import RankOptions
from tests.processes import running
from tests.runtime.accel.engines import ASKED, PROMPTS, check_blocks, make_artifact
from tests.runtime.accel.test_group import HEADS, answers, ranks

FAST_DEATH = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
RESOURCE = "dovetail-rank"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("ray"), **HEADS)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A cluster whose head runs no rank; nodes are added by the test."""
    from ray.cluster_utils import Cluster

    monkeypatch.chdir(tmp_path)  # Ray's workers look for packages where the driver stands
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else other work keeps them from starting
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": FAST_DEATH}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, resources={RESOURCE: 1}, object_store_memory=80 << 20)


def fail_while_running(app: App, kill: Callable[[], None], words: str) -> None:
    jobs = [app.submit(prompt, **ASKED | {"max_tokens": 150}) for prompt in PROMPTS[:3]]
    next(iter(jobs[0]))
    kill()
    for job in jobs:
        with pytest.raises(RankError, match=words):
            job.result()
    check_blocks(app)


def spread(cluster: Any) -> RankOptions:
    return RankOptions(backend="gloo", ray=cluster.address, resources={RESOURCE: 1})


@pytest.fixture(scope="module")
def alone(artifact: Path) -> list[tuple[int, ...]]:
    with load(artifact, kv_blocks=200, threads=1) as app:
        return answers(app)


def test_ranks_on_two_nodes_give_the_tokens(
    artifact: Path, alone: list[tuple[int, ...]], cluster: Any
) -> None:
    for _ in range(2):
        add_node(cluster)
    with ranks(artifact, 3, 9, 30, options=spread(cluster)) as (app, plans):
        assert answers(app) == alone
        assert app.engine.executor.group is not None
        pids = app.engine.executor.group.pids
        assert len(running(pids)) == 2
    assert any(batch.cpu_decode for step in plans for batch in step.batches)
    wait_for_end(pids)


def wait_for_end(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            assert select.select([end], [], [], 60)[0], "a rank lives on"
            os.close(end)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_rank_and_a_node_that_die_fail_what_runs_and_the_next_is_served(
    artifact: Path, alone: list[tuple[int, ...]], cluster: Any
) -> None:
    nodes = [add_node(cluster), add_node(cluster)]
    with ranks(artifact, 3, 9, 30, options=spread(cluster)) as (app, _):
        group = app.engine.executor.group
        assert group is not None
        pids = group.pids
        fail_while_running(app, lambda: os.kill(pids[0], signal.SIGKILL), "rank 1 of 3")
        assert answers(app, PROMPTS[:3]) == alone[:3]  # both nodes have a rank again
        wait_for_end(pids)

        def kill_node() -> None:
            cluster.remove_node(nodes[0], allow_graceful=False)

        pids = group.pids
        fail_while_running(app, kill_node, "rank [12] of 3")
        wait_for_end(pids)
        add_node(cluster)
        assert answers(app, PROMPTS[:3]) == alone[:3]


def test_no_cluster_at_the_address_is_one_sentence(artifact: Path) -> None:
    options = RankOptions(backend="gloo", ray="no-such-scheme://127.0.0.1:1")
    with pytest.raises(SpecError, match="no Ray cluster answers"):
        with ranks(artifact, 2, 9, 30, options=options):
            pass
