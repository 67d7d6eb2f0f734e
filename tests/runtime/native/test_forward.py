"""A step runs as the model's schedule tables say, also in what no kernel reads by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.runtime.artifact import ModelPart, open_artifact
from dovetail.runtime.engine.executor import open_on_cpu
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.topology.hardware import read_hardware
from tests.models import save_model

PROMPT = [1 + i * 7 % 90 for i in range(200)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forward")
    save_model(folder / "model", "llama", num_attention_heads=2, num_key_value_heads=1)
    compile_model(
        folder / "model",
        output=folder / "app.dove",
        effort="none",
        weight_dtype="f32",
        max_step_tokens=256,
        max_context=256,
    )
    return folder / "app.dove"


def cut_into(part: ModelPart, least: int) -> ModelPart:
    """Return the model with other parts of a sequence in decode attention."""
    tables = [
        structs.replace(
            table,
            rows=tuple(
                structs.replace(r, schedule=make_schedule(block_k=least)) for r in table.rows
            ),
        )
        if table.op == "decode_attention"
        else table
        for table in part.schedules.tables
    ]
    return replace(part, schedules=structs.replace(part.schedules, tables=tuple(tables)))


def run(path: Path, least: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], set[int]]:
    """Return the tokens, and into how many parts decodes cut their keys."""
    hardware = read_hardware()
    artifact = open_artifact(path, hardware)
    part = cut_into(next(iter(artifact.models.values())), least)
    options = EngineOptions(threads=2, kv_blocks=20)
    engine = open_on_cpu(artifact, part, hardware, options)
    cuts: set[int] = set()
    arguments = engine.executor.buffers.forward_args

    def note(shape, splits):  # type: ignore[no-untyped-def]
        cuts.update({splits} if shape.n_decode else {})
        return arguments(shape, splits)

    monkeypatch.setattr(engine.executor.buffers, "forward_args", note)
    (request,) = engine.submit(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.scheduler.requests:
        engine.step()
    engine.close()
    return list(request.output), cuts


def test_the_table_says_how_small_parts_of_a_sequence_may_be(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One KV head for two threads: cut in two, unless 200 keys are too few for that."""
    found = {least: run(path, least, monkeypatch) for least in (0, 16, 64, 512)}
    assert [cuts for _, cuts in found.values()] == [{1}, {2}, {2}, {1}]
    assert len({tuple(tokens) for tokens, _ in found.values()}) == 1
