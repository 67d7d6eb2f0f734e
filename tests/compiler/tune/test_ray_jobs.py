"""Tuning over a real Ray cluster on this machine, of which nodes are killed while they measure."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter

import msgspec
import pytest

from dovetail.codegen.library import ABI
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.measure.recorder import hardware_key
from dovetail.compiler.tune.model import tune_kinds, tune_model
from dovetail.ir.errors import SpecError
from dovetail.topology.hardware import read_hardware
from tests.dovetail.commands import dovetail
from tests.models import save_model
from tests.repository import ROOT

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dovetail[ray]'")

from dovetail.compiler.tune.ray_jobs import claim_pus
from dovetail.runtime.group import ray_ranks

LABEL = hardware_key(read_hardware(), 1, ABI).label
PATIENT = {"health_check_timeout_ms": 60_000}
FAST_DEATH = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("ray") / "model", "llama")


@pytest.fixture
def cluster(request, monkeypatch, tmp_path):
    """A cluster whose head measures nothing; nodes are added by the test.

    The test's parameter, if it has one, says when the head takes a silent node for dead.
    """
    from ray.cluster_utils import Cluster

    monkeypatch.chdir(tmp_path)  # Ray's workers look for packages where the driver stands
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv(
        "RAY_raylet_start_wait_time_s", "120"
    )  # beside other work nodes start slowly
    health = getattr(request, "param", PATIENT)
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": health}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def add_node(cluster, label=LABEL, **options):
    size = {"num_cpus": 1, "object_store_memory": 80 << 20}
    return cluster.add_node(resources={label: 1}, **size, **options)


def tune(model, database, cluster, **options):
    options = {"threads": 1, "budget": 6.0, "ray": cluster.address} | options
    return tune_model(model, database=database, **options)


def test_trials_run_on_nodes_of_the_machine_that_is_tuned_for(model, tmp_path, cluster):
    database = tmp_path / "tuning.jsonl"
    add_node(cluster, "dovetail-000000000000")
    with pytest.raises(SpecError, match=rf"offers {LABEL}.*--resources='{{\"{LABEL}\": 1}}'"):
        tune(model, database, cluster)
    add_node(cluster)
    report = tune(model, database, cluster, budget=2.0)
    assert report.workers == 1 and report.progress.done == report.progress.items
    assert report.measured == report.trials and len(TuningDatabase(database)) > 0
    assert {record.hardware.label for record in TuningDatabase(database)} == {LABEL}


@pytest.mark.long
def test_the_example_runs_a_job_for_each_model(model, tmp_path, cluster):
    cluster.add_node(num_cpus=len(os.sched_getaffinity(0)), resources={LABEL: 1})
    asked = cluster.address, str(tmp_path / "tuning.jsonl"), "2", str(model), str(model)
    command = [sys.executable, "-P", str(ROOT / "examples/tune_on_ray.py"), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 2 and all("by 1 workers" in line for line in told)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [FAST_DEATH], indirect=True)
def test_a_node_that_dies_loses_no_record_and_the_job_ends_complete(model, tmp_path, cluster):
    database, seen = tmp_path / "tuning.jsonl", []
    nodes = [add_node(cluster), add_node(cluster)]
    killed = threading.Event()

    def kill_one(at):
        seen.append(at.trials)
        if not killed.is_set():
            killed.set()
            cluster.remove_node(nodes[0], allow_graceful=False)

    report = tune(model, database, cluster, progress=kill_one)
    assert report.workers == 2 and killed.is_set()
    assert report.progress.done == report.progress.items and not report.progress.failed
    assert report.measured == report.trials == seen[-1] <= len(TuningDatabase(database))


STAND_IN = """
import os
if name := os.environ.get("STANDS_FOR"):
    from msgspec.structs import replace
    from dovetail.topology import hardware
    read = hardware.read_sysfs
    hardware.read_sysfs = lambda root: replace(read(root), cpu_model=name)
"""


@pytest.mark.long
def test_each_kind_of_machine_has_records_of_its_own(model, tmp_path, cluster):
    """Two nodes of this machine, of which one takes itself for another kind."""
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in/sitecustomize.py").write_text(STAND_IN)
    other = msgspec.structs.replace(read_hardware(), cpu_model="another kind")
    label, environment = hardware_key(other, 1, ABI).label, {"STANDS_FOR": "another kind"}
    environment["PYTHONPATH"] = str(tmp_path / "stand_in")
    add_node(cluster)
    add_node(cluster, label, env_vars=environment)
    database = tmp_path / "tuning.jsonl"
    asked = ("--db", database, "--threads", 1, "--budget", "2s", "--json")
    told = dovetail("tune", model, "--ray", cluster.address, "--hardware", "all", *asked)
    reports = json.loads(told.out)["kinds"]
    assert {report["machine"] for report in reports} == {LABEL, label}
    assert all(at["done"] == at["items"] for at in (report["progress"] for report in reports))
    labels = Counter(record.hardware.label for record in TuningDatabase(database))
    assert labels.keys() == {LABEL, label}
    add_node(cluster, "dovetail-000000000000")
    with pytest.raises(SpecError, match=f"offers dovetail-000000000000 but is {LABEL}"):
        tune_kinds(model, ray=cluster.address, database=database, threads=1, budget=2.0)


def test_trials_on_one_node_hold_different_pus_and_wait_for_free_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = read_hardware("package:1 core:2")
    third: list[tuple[int, ...]] = []

    def claim_late() -> None:
        with claim_pus(here, 1) as pus:
            third.append(pus)

    waiting = threading.Thread(target=claim_late)
    with claim_pus(here, 1) as second:
        with claim_pus(here, 1) as first:
            assert sorted((*first, *second)) == [0, 1]
            waiting.start()
        waiting.join(timeout=60)  # `second` is still held: it can only get what is free again
        assert third == [first]


def test_no_cluster_at_the_address_is_one_sentence(model, tmp_path):
    with pytest.raises(SpecError, match="no Ray cluster answers"):
        tune_model(model, database=tmp_path / "db", ray="no-such-scheme://127.0.0.1:1")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_found_out_at_once(monkeypatch, scheme):
    """Ray itself would ask again and again for more than a minute."""
    monkeypatch.setattr(ray_ranks.ray, "init", lambda **options: pytest.fail("Ray was asked"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        place = f"{scheme}127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SpecError, match=f"no Ray cluster answers at {place} .*refused"):
            ray_ranks.connect(place)
