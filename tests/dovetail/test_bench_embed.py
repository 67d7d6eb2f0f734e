"""`dovetail bench embed`: an artifact on this machine, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.cli.bench_embed import EmbedReport, describe_capacity
from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.sim.capacity import NO_ACCELERATOR
from dovetail.tiny_world import ENCODER
from tests.dovetail.commands import assert_one_sentence, dovetail


@pytest.mark.long
def test_an_artifact_is_measured_beside_torch(tmp_path: Path) -> None:
    path = tmp_path / "tiny.dove"
    compile_model(ENCODER, output=path, effort="none", threads=1, weight_dtype="f32")
    options = (
        "--slo",
        "0.05s",
        "--length",
        16,
        "--repeats",
        1,
        "--threads",
        1,
        "--device",
        "torch:cpu",
    )
    result = dovetail("bench", "embed", path, *options, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    (row,) = report["results"]
    assert row["together"].keys() == row["alone"].keys() == {"npu", "cpu"}
    alone = row["alone"]["npu"]
    assert row["gain"] == pytest.approx((sum(row["together"].values()) - alone) / max(alone, 1))
    assert report["accelerator"].startswith("torch:cpu: ")
    assert_one_sentence(dovetail("bench", "embed", path, "--length", 100_000))


@pytest.mark.parametrize(
    ("accelerator", "said"),
    [(NO_ACCELERATOR, "tiny.dove, the CPU alone"), ("cuda:0: H100", "tiny.dove, npu cuda:0: H100")],
)
def test_the_table_names_the_accelerator_if_there_is_one(accelerator: str, said: str) -> None:
    (table,) = describe_capacity(EmbedReport("tiny.dove", accelerator, []))
    assert table.title == said


@pytest.mark.parametrize("options", [("missing.dove", "--slo", "never"), ("missing.dove",)])
def test_bad_input_is_one_sentence(options: tuple[str, ...]) -> None:
    assert_one_sentence(dovetail("bench", "embed", *options))


def test_no_threads_are_not_all_threads() -> None:
    done = dovetail("bench", "embed", "missing.dove", "--threads", 0)
    assert done.code == 2 and "x>=1" in done.err, done.err
