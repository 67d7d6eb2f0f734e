"""A weight format is one entry of a table: float16, registered here only, serves a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.child import GemmRun, WeightPool
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.rules.schedules import LINEAR, SILU, GemmOp, built_tiles, gemm_requests
from dovetail.compiler.search.space import Problem, Program, Scheme, Slice
from dovetail.compiler.tape.forward import build_forward_tape
from dovetail.compiler.write.weights import total_bytes
from dovetail.ir.cpu import FORCED_TARGET
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.formats import FORMATS, FloatFormat
from dovetail.runtime.app import load
from dovetail.runtime.machine.library import KernelLibrary
from dovetail.runtime.native.shard import matrix_ranges, shard_tape, split_model
from dovetail.runtime.native.tape import Team
from dovetail.runtime.schedule.request import SamplingParams
from tests.compiler.tape.test_forward import make_spec, plan_weights
from tests.models import make_model
from tests.runtime.native.test_shard import slots
from tests.test_fidelity import load_exact, reference_logits

HALF = FloatFormat("f16", DTYPES["f16"], 1)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, HALF.name, HALF)


def operators() -> Iterator[GemmOp]:
    for kind in (LINEAR, SILU):
        yield GemmOp(kind, kind, 100, 257, HALF.name)


def test_programs_of_the_search_space_are_right() -> None:
    target = host_target()
    widest = {op.kind: max(built_tiles(op.kind, target)) for op in operators()}
    names = {op.kernel(target, built_tiles(op.kind, target)[widest[op.kind]]) for op in operators()}
    requests = gemm_requests([HALF.name], target)
    kept = tuple(r for r in requests if r.name in names or r.kernel == "gemm_linear_reduce")
    built = build_library(LibrarySpec(target, kept, tvm_ffi=False))
    assert all("ptr[f16]" in str(kernel.params) for kernel in built.index.kernels)
    library = KernelLibrary(built.path, built.index)
    team, pool = Team(library, 2, 0), WeightPool(HALF.name, 1 << 20)
    for op in operators():
        for m in (1, 5, 40):
            check_programs(Problem(op, m, target, threads=2), widest[op.kind], library, team, pool)


def check_programs(
    problem: Problem, panels: int, library: KernelLibrary, team: Team, pool: WeightPool
) -> None:
    run = GemmRun(library, team, problem.case, pool, {})
    tiles = [tile for tile in problem.tiles() if tile.panels == panels]
    parts = [Slice(0, 1, 0), Slice(0, 0, 64)] if problem.op.kind == LINEAR else [Slice(0, 1, 0)]
    schemes = {Scheme(1, 2, 1), *problem.schemes()}
    for program in (Program(t, p, s, -1) for t in tiles for p in parts for s in schemes):
        candidate = problem.candidate(program)
        assert problem.program(candidate) == program
        assert run.check(candidate), program


def test_a_model_has_the_logits_of_its_float16_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED_TARGET, "generic")  # its kernels are the quickest to build
    model = make_model("llama", dtype="float16", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    exact = {"effort": "none", "kv_dtype": "f32"}
    report = compile_model(tmp_path / "model", output=tmp_path / "app.dove", **exact)
    assert report.weight_dtype == HALF.name
    prompt = list(range(2, 40))
    with load(report.path) as app:
        app.engine.submit(prompt, SamplingParams(max_tokens=1))
        app.engine.step()
        got = app.engine.executor.buffers.logits(0)
        wanted = reference_logits(load_exact(tmp_path / "model"), prompt)[-1]
        assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_are_views_of_its_panels(ranks: int) -> None:
    spec = make_spec(weight_dtype=HALF.name, n_kv_heads=4, vocab_size=101)
    weights = plan_weights(spec)
    tape = build_forward_tape(spec, weights, 32, 4)
    read = np.zeros(total_bytes(weights), np.int8)
    for rank in range(ranks):
        shard = split_model(spec, rank, ranks)
        part = tape if ranks == 1 else shard_tape(tape, spec, weights, slots, shard)
        for start, end in matrix_ranges(part, weights, slots):
            read[start:end] += 1
    for weight in weights:
        wanted = weight.layout.startswith("packed")
        assert (read[weight.offset : weight.offset + weight.bytes] == wanted).all(), weight.name
