"""Several adapters served from one base: each gives what the model gives that it makes.

Tokens of rows of adapters beside others are compared with the artifact of each adapter merged, and
with transformers over weights that numpy summed. Near ties end a comparison, as elsewhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import dovetail
from dovetail import END, START, RAGraph
from dovetail.cli.inspection import inspect_artifact, memory_rows
from dovetail.compiler.models.adapters import adapter_sources
from dovetail.compiler.models.source import open_model
from dovetail.compiler.write.memory_check import memory_need
from dovetail.errors import DeviceError, RequestError, SpecError, WorkflowError
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule.request import Completion
from tests.adapters import save_adapter, save_merged
from tests.gguf_files import save_gguf
from tests.models import save_model
from tests.runtime.schedule.integrity import check_integrity
from tests.tapes import verify_tapes
from tests.test_fidelity import TIE, count_agreement, load_exact

NAMES = (None, "low", "some", "wide")
PROMPTS = ([7, 8, 9], list(range(3, 40)), list(range(5, 75)))
MOST = 20
Answers = Mapping[tuple[str | None, int], Completion]


def make_adapters(folder: Path, base: Path) -> dict[str, Path]:
    """Write three adapters of different ranks; one of them changes few modules, of one layer."""
    return {
        "low": save_adapter(folder / "low", base, 1),
        "some": save_adapter(
            folder / "some", base, 3, takes=lambda name: ".0." in name and "k_" not in name
        ),
        "wide": save_adapter(folder / "wide", base, 24),
    }


def compiled(source: Path, output: Path, **options: Any) -> Path:
    options = {"effort": "none", "weight_dtype": "f32", "threads": 2, **options}
    dovetail.compile(source, output=output, **options)
    verify_tapes(output)
    return output


def ask(app: App, name: str | None, prompt: list[int], most: int = MOST) -> Any:
    return app.submit(prompt, adapter=name, max_tokens=most, ignore_eos=True, logprobs=1)


def alone(paths: Mapping[str | None, Path], prompts: Any = PROMPTS, **options: Any) -> Answers:
    """Return the answer of each adapter's own artifact to each prompt."""
    found = {}
    for name, path in paths.items():
        with load(path, **options) as app:
            for place, prompt in enumerate(prompts):
                found[name, place] = ask(app, None, prompt).result()
    return found


def same(got: Completion, want: Completion, slack: float = 3e-5) -> None:
    """Compare tokens and log probabilities up to where two tokens were nearly as likely."""
    assert got.logprobs is not None and want.logprobs is not None
    for one, other in zip(got.logprobs, want.logprobs, strict=True):
        if one.token_id != other.token_id:
            assert abs(one.logprob - other.logprob) < TIE
            return
        assert abs(one.logprob - other.logprob) < slack


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """The artifact with all adapters, as `all`, and those with each merged."""
    folder = tmp_path_factory.mktemp("adapters")
    base = save_model(folder / "model", "llama", attention_bias=True, mlp_bias=True)
    adapters = make_adapters(folder, base)
    sources = {None: base, **adapters}
    found: dict[str | None, Path] = {
        name: compiled(source, folder / f"{name}.dove") for name, source in sources.items()
    }
    return found | {"all": compiled(base, folder / "all.dove", adapters=adapters)}


@pytest.fixture(scope="module")
def wanted(paths: dict[str | None, Path]) -> Answers:
    found = alone({name: paths[name] for name in NAMES})
    told = {found[name, 1].token_ids for name in NAMES}
    assert len(told) == len(NAMES), "each says something else"
    return found


@pytest.fixture(scope="module")
def app(paths: dict[str | None, Path]) -> Iterator[App]:
    with load(paths["all"]) as opened:
        yield opened


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2)), min_size=1, max_size=12))
def test_any_mixed_batch(app: App, wanted: Answers, asked: list[tuple[str | None, int]]) -> None:
    jobs = [ask(app, name, PROMPTS[place]) for name, place in asked]
    for key, job in zip(asked, jobs, strict=True):
        same(job.result(), wanted[key])
    check_integrity(app.engine.scheduler.pool)


def test_rows_of_the_base_have_its_bits(app: App, wanted: Answers) -> None:
    jobs = [ask(app, name, PROMPTS[0]) for name in (None, "wide", "low")]
    assert jobs[0].result().logprobs == wanted[None, 0].logprobs
    jobs[1].result(), jobs[2].result()


def test_prompts_in_chunks_and_requests_that_give_way(
    paths: dict[str | None, Path], wanted: Answers
) -> None:
    with load(paths["all"], kv_blocks=11, max_num_batched_tokens=24, max_num_seqs=6) as app:
        jobs = {(n, p): ask(app, n, PROMPTS[p]) for p in (1, 2) for n in NAMES}
        found = {key: job.result() for key, job in jobs.items()}
        assert sum(one.metrics.preemptions for one in found.values()) > 0
        check_integrity(app.engine.scheduler.pool)
    for key, one in found.items():
        same(one, wanted[key])


def test_only_requests_of_one_adapter_share_what_prompts_begin_with(
    paths: dict[str | None, Path], tmp_path: Path, wanted: Answers
) -> None:
    def cached(app: App, name: str | None) -> int:
        found = ask(app, name, PROMPTS[2]).result()
        same(found, wanted[name, 2])
        return found.metrics.cached_tokens

    file = {"kv_file": str(tmp_path / "kv"), "kv_file_bytes": 1 << 20}
    with load(paths["all"], **file) as app:
        assert [cached(app, name) for name in NAMES] == [0, 0, 0, 0]
        assert [cached(app, name) for name in NAMES] == [64, 64, 64, 64]
        check_integrity(app.engine.scheduler.pool)
    with load(paths["all"], **file) as app:
        assert [cached(app, name) for name in ("wide", None)] == [64, 64]


def test_deterministic_loads_give_an_adapter_its_bits_in_any_batch(
    paths: dict[str | None, Path],
) -> None:
    with load(paths["all"], deterministic=True, threads=1) as app:
        first = ask(app, "wide", PROMPTS[1]).result()
    with load(paths["all"], deterministic=True, max_num_batched_tokens=64) as app:
        jobs = [ask(app, name, PROMPTS[place]) for place in (2, 1) for name in NAMES]
        assert jobs[-1].result().logprobs == first.logprobs
        [job.result() for job in jobs]


def test_drafts_forms_and_samples(paths: dict[str | None, Path], app: App) -> None:
    prompt = [5, 6, 7, 8] * 8
    plain = ask(app, "wide", prompt, 24).result()
    with load(paths["all"], speculative_config={"method": "suffix"}) as drafting:
        jobs = [ask(drafting, name, prompt, 24) for name in ("wide", None, "low")]
        same(jobs[0].result(), plain)
        [job.result() for job in jobs]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    several = app.generate([prompt, prompt[:9]], adapter="low", n=2, **options)
    assert len({one.token_ids for one in several}) > 1
    allowed = app.generate(prompt, adapter="low", max_tokens=4, allowed_token_ids=[50, 51])
    assert set(allowed[0].token_ids) <= {50, 51}


def test_prompts_are_scored_by_the_adapter_that_is_asked(app: App, paths: dict[Any, Path]) -> None:
    asked: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 0}
    found = app.generate(PROMPTS[1], adapter="wide", **asked)[0].prompt_logprobs
    scored = app.score(PROMPTS[1], adapter="wide")[0].logprobs
    assert scored == tuple(one and one.logprob for one in found)
    with load(paths["wide"]) as merged:
        known = merged.generate(PROMPTS[1], **asked)[0].prompt_logprobs
    pairs = [(a.logprob, b.logprob) for a, b in zip(found, known, strict=True) if a and b]
    np.testing.assert_allclose(*zip(*pairs, strict=True), atol=3e-5)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3", "ernie4_5", "granite", "cohere2"])
def test_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", family)
    adapters = make_adapters(tmp_path, base)
    output = compiled(base, tmp_path / "all.dove", adapters=adapters)
    ties = 0
    with load(output) as app:
        jobs = {(n, p): ask(app, n, PROMPTS[p]) for p in (0, 1) for n in adapters}
        for (name, place), job in jobs.items():
            merged = tmp_path / f"{name}-merged"
            if not merged.exists():
                save_merged(merged, base, adapters[name])
            exact = load_exact(merged)
            tokens = job.result().token_ids
            ties += count_agreement(exact, exact, list(PROMPTS[place]), tokens)[1]
    assert ties <= 1


def test_each_target_of_this_machine(
    each_target: str, tmp_path: Path, wanted: Answers, paths: dict[Any, Path]
) -> None:
    base, folder = paths[None].parent / "model", paths[None].parent
    adapters = {name: folder / name for name in NAMES if name}
    output = compiled(base, tmp_path / "all.dove", adapters=adapters, targets=(each_target,))
    with load(output) as app:
        jobs = {(name, p): ask(app, name, PROMPTS[p]) for p in (0, 1) for name in NAMES}
        for key, job in jobs.items():
            same(job.result(), wanted[key])


def save_floats(folder: Path, base: Path, file: Path) -> Path:
    """Write the model with the weights of a GGUF file of it."""
    checkpoint = open_model(file).checkpoint()
    shutil.copytree(base, folder)
    state = {name: checkpoint.floats(name) for name in load_file(base / "model.safetensors")}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", pytest.param("Q5_1", marks=pytest.mark.long)])
def test_bases_of_few_bits_keep_theirs(kind: str, tmp_path: Path) -> None:
    """The reference has the base's own rounded weights, and sums of floats."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 300}
    base = save_model(tmp_path / "model", "llama", **shape)
    adapters = make_adapters(tmp_path, base)
    source = save_gguf(tmp_path / "m.gguf", base, kind)
    options = {"weight_dtype": "auto", "kv_dtype": "f32"}
    plain = compiled(source, tmp_path / "plain.dove", **options)
    output = compiled(source, tmp_path / "all.dove", adapters=adapters, **options)
    with load(output, activations="float") as app, load(plain, activations="float") as other:
        bare = ask(other, None, PROMPTS[1]).result()
        jobs = [ask(app, name, PROMPTS[1]) for name in NAMES]
        found = [job.result() for job in jobs]
        same(found[0], bare)
        assert len({one.token_ids for one in found}) == len(NAMES)
    rounded = save_floats(tmp_path / "rounded", base, source)
    for name, one in zip(NAMES[1:], found[1:], strict=True):
        assert name is not None
        exact = load_exact(save_merged(tmp_path / f"{name}-m", rounded, adapters[name]))
        assert count_agreement(exact, exact, list(PROMPTS[1]), one.token_ids)[1] <= 1


def test_a_repeated_compile_keeps_its_adapters(
    paths: dict[str | None, Path], wanted: Answers, tmp_path: Path
) -> None:
    dovetail.compile(paths["all"], output=tmp_path / "again.dove", effort="none")
    with load(tmp_path / "again.dove", check_weights=True) as app:
        same(ask(app, "some", PROMPTS[1]).result(), wanted["some", 1])
    with pytest.raises(SpecError, match="in which adapters, weight_dtype cannot change"):
        compiled(paths["all"], tmp_path / "b.dove", adapters={"x": tmp_path})


def test_what_adapters_cannot_have_is_told(paths: dict[str | None, Path], app: App) -> None:
    with pytest.raises(RequestError, match="no adapter 'other'; the artifact has low, some, wide"):
        app.generate([1, 2], adapter="other")
    with pytest.raises(RequestError, match="adapter must be the name of an adapter, not 3"):
        app.generate([1, 2], adapter=3)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="with adapters beside a model run on the CPU alone"):
        load(paths["all"], device="torch:cpu")
    phase = PhasePlan(threads=1, cpus=())
    with pytest.raises(SpecError, match="runs in one process"):
        load(paths["all"], plan=ServicePlan(processes=2, prefill=phase, decode=phase))


def test_nodes_that_ask_for_unknown_adapters_are_told_before_they_run(
    paths: dict[str | None, Path], app: App, tmp_path: Path
) -> None:
    graph = RAGraph("pair")
    graph.add_generation("say", prompt="a", max_tokens=1, adapter="other")
    graph.add_edge(START, "say")
    graph.add_edge("say", END)
    said = r"'pair': node 'say': there is no adapter 'other'; the artifact has "
    with pytest.raises(WorkflowError, match=f"{said}low, some, wide"):
        app.add_workflow(graph)
    base = paths["all"].parent / "model"
    with pytest.raises(WorkflowError, match=f"{said}none"):
        compiled(base, tmp_path / "x.dove", workflows=[graph])


def test_adapters_are_part_of_the_memory_that_is_asked_for(
    paths: dict[str | None, Path], app: App
) -> None:
    part = app.artifact.models["llm"]
    step = part.file.max_step_tokens, part.file.max_step_sequences
    need = memory_need(part.file.spec, step, [*adapter_sources(part.file.weights)])
    assert need.weights == part.weights.stat().st_size
    rows = {name: size for name, size, _ in memory_rows(inspect_artifact(paths["all"]))}
    assert need.activations == rows["llm: activations"]
    assert 0 <= need.weights - rows["llm: weights"] < 4096 * len(part.file.weights)


def test_steps_without_rows_of_adapters_run_the_tape_of_the_base(
    paths: dict[str | None, Path], app: App
) -> None:
    assert not [*paths[None].glob("models/*/tapes/*adapted*")]
    tapes = ["models/llm/tapes/forward.json", "models/llm/tapes/sample.json"]
    for tape in tapes:
        assert json.loads((paths[None] / tape).read_text()) == json.loads(
            (paths["all"] / tape).read_text()
        )
    adapted = app.engine.executor.model.adapted["decode"]
    adapted.times = []
    ask(app, None, PROMPTS[0]).result()
    assert adapted.times == []
    ask(app, "low", PROMPTS[0]).result()
    assert len(adapted.times) > 1
    adapted.times = None
