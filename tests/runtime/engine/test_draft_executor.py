"""A draft model changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import dovetail
from dovetail.compiler.pipeline import compile_model
from dovetail.errors import DovetailError
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule import experience, speculation
from dovetail.tiny_world import LLAMA
from tests.dovetail.commands import assert_one_sentence
from tests.dovetail.commands import dovetail as run_verb
from tests.models import save_model
from tests.runtime.engine.test_speculation import CASES, PROMPTS, count, open_app
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.server.live import serving

LIMITS = {"max_step_tokens": 64, "max_step_sequences": 32, "max_context": 256}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model; the same in 4 bits; one with random weights and the same vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    config = json.loads((LLAMA / "config.json").read_text())
    random = save_model(
        folder / "random", "llama", vocab_size=config["vocab_size"], eos_token_id=1, bos_token_id=0
    )
    shutil.copy(LLAMA / "tokenizer.json", random)
    made = {"tiny": (LLAMA, "f32"), "small": (LLAMA, "int4"), "random": (random, "f32")}
    for name, (source, width) in made.items():
        path = folder / f"{name}.dove"
        compile_model(source, output=path, effort="none", weight_dtype=width, **LIMITS)
    return {name: folder / f"{name}.dove" for name in made}


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted is the model's: nothing is looked up."""
    monkeypatch.setattr(speculation, "SHORT", 1000)


def open_with(models: dict[str, Path], draft: str | None, **options: Any) -> App:
    """Open the tiny model on a clock that finds any draft worth it."""
    chosen = None if draft is None else str(models[draft])
    return open_app(models["tiny"], draft is not None, draft=chosen, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"kv_blocks": 20, "threads": 1}], ids=["", "preempted"])
def test_deterministic_loads_give_the_same_tokens(
    models: dict[str, Path], case: str, options: dict[str, Any]
) -> None:
    """Batches of 1 and 6, prompts again: those are shared."""
    asked = {"max_tokens": 40, "ignore_eos": True, **CASES[case]}
    if options and "n" in asked:
        asked["n"] = 2
    found, told = [], []
    for draft in (None, "small"):
        with open_with(models, draft, deterministic=True, **options) as app:
            alone = app.generate(PROMPTS[0], **asked)
            done = [*alone, *app.generate(PROMPTS, **asked), *app.generate(PROMPTS[1], **asked)]
            found.append([(d.token_ids, d.finish_reason, d.text) for d in done])
            check_integrity(app.engine.scheduler)
            told.append([one.logprob for d in done for one in d.logprobs or ()])
            if draft and case == "greedy":
                drafter = app.engine.scheduler.speculation.drafter
                check_integrity(drafter.pool)
                accepted = count(app, "accepted_tokens")
                assert accepted > 100 and accepted > 0.7 * count(app, "draft_tokens")
    assert found[0] == found[1]
    assert told[0] == pytest.approx(told[1], abs=1e-5)


def test_a_bad_model_changes_no_token(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is sure of all that it thinks."""
    monkeypatch.setattr(experience, "PRIOR", 1e9)  # no experience makes it give up
    asked = {"max_tokens": 40, "ignore_eos": True}
    found = []
    for draft in (None, "random"):
        with open_with(models, draft, deterministic=True) as app:
            if draft:
                drafter = app.engine.scheduler.speculation.drafter
                read = drafter._read
                drafter._read = lambda *batch, read=read: [
                    (token, 0.0) for token, _ in read(*batch)
                ]
            done = [*app.generate(PROMPTS[0], **asked), *app.generate(PROMPTS[:4], **asked)]
            found.append([d.token_ids for d in done])
            if draft:
                assert count(app, "draft_tokens") > count(app, "accepted_tokens") + 50
    assert found[0] == found[1]


def test_an_answer_takes_fewer_steps(models: dict[str, Path]) -> None:
    """Fails if nothing is drafted: the steps are counted."""
    steps = []
    for draft in (None, "small"):
        with open_with(models, draft) as app:
            engine, ran = app.engine, itertools.count()
            step = engine.step
            engine.step = lambda step=step, ran=ran: (next(ran), step())[1]  # type: ignore[method-assign]
            app.generate(PROMPTS[1], max_tokens=60, ignore_eos=True)
            steps.append(next(ran))
    assert steps[0] >= 60 and steps[1] < steps[0] / 2


def test_what_the_model_reads_is_what_requests_have(
    make_artifact: Callable[..., Path],
    answer: Callable[..., list[int]],
) -> None:
    """The toy model answers wrongly as soon as one slot is: as its own draft it is never wrong."""
    path = make_artifact(kv_blocks=24)
    with open_app(path, True, draft=str(path)) as app:
        prompts = [[(7 * i + j) % 90 for j in range(3 + 9 * i)] for i in range(8)]
        for n in (1, 4, 8):
            done = app.generate(prompts[:n], max_tokens=60)
            assert [list(d.token_ids) for d in done] == [answer(p, 60) for p in prompts[:n]]
        assert count(app, "accepted_tokens") > 60
        drafter = app.engine.scheduler.speculation.drafter
        assert drafter._known[0].all.chance(1.0) == 1.0, "a drafted token was wrong"
        check_integrity(drafter.pool)


def test_requests_that_are_dropped_leave_no_trace(models: dict[str, Path]) -> None:
    with open_with(models, "small", deterministic=True) as app:
        (plain,) = app.generate(PROMPTS[1], max_tokens=40, ignore_eos=True)
        for _ in range(3):
            pieces = app.stream(PROMPTS[2], max_tokens=200, ignore_eos=True)
            for _ in range(5):
                next(pieces)
            pieces.close()  # type: ignore[attr-defined]
        (again,) = app.generate(PROMPTS[1], max_tokens=40, ignore_eos=True)
        assert again.token_ids == plain.token_ids
        app.generate(PROMPTS[0], max_tokens=20, ignore_eos=True)
        drafter = app.engine.scheduler.speculation.drafter
        assert len(drafter._copies) <= 1
        check_integrity(drafter.pool)


def test_the_engine_in_a_process_of_its_own_drafts_and_tells_it(models: dict[str, Path]) -> None:
    """`num_speculative_tokens` bounds drafts of the model, too."""
    asked = {"max_tokens": 100, "ignore_eos": True}
    with load(models["tiny"], deterministic=True) as app:
        (plain,) = app.generate(PROMPTS[1], **asked)
    options: dict[str, Any] = {"deterministic": True, "draft": str(models["small"])}
    with load(models["tiny"], apart=True, **options) as app:
        assert app.generate(PROMPTS[1], **asked)[0].token_ids == plain.token_ids
        assert set(app.generator.host.load.drafts) <= {"drafts", "draft_tokens", "accepted_tokens"}
    none = {"num_speculative_tokens": 0}
    with load(models["tiny"], speculative_config=none, **options) as app:
        assert app.engine.scheduler.speculation is None


def test_the_face_compiles_a_draft_model(models: dict[str, Path]) -> None:
    with dovetail.load(models["tiny"], draft=str(LLAMA)) as app:
        assert app.engine.scheduler.speculation.drafter is not None
        assert len(app.generate(PROMPTS[1], max_tokens=20)[0].token_ids) <= 20


@pytest.mark.parametrize("differs", ["tokenizer", "size"])
def test_another_vocabulary_is_refused_before_anything_starts(
    models: dict[str, Path], tmp_path: Path, differs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "other"
    if differs == "size":
        save_model(source, "llama")
        said = "it has 100 tokens, the model 768"
    else:
        shutil.copytree(LLAMA, source)
        file = source / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        words = tokenizer["model"]["vocab"]
        words.update({"Ġthe": words["Ġa"], "Ġa": words["Ġthe"]})
        file.write_text(json.dumps(tokenizer))
        said = "tokens that the model has, 2 are others"
    other = tmp_path / "other.dove"
    compile_model(source, output=other, effort="none", **LIMITS)
    monkeypatch.setattr("dovetail.runtime.app.open_engine", lambda *_: pytest.fail("it started"))
    with pytest.raises(DovetailError, match=rf"{said}.*same family") as raised:
        load(models["tiny"], draft=str(other))
    assert str(other) in str(raised.value)


def test_verbs_take_a_draft_model(models: dict[str, Path], tmp_path: Path) -> None:
    ids = ",".join(map(str, PROMPTS[1]))
    asked = ("--prompt-ids", ids, "--max-tokens", 60, "--ignore-eos", "--json")
    flags = (models["tiny"], "--device", "cpu", "--deterministic")
    plain, drafted = (
        run_verb("run", *flags, *more, *asked) for more in ((), ("--draft", models["small"]))
    )
    assert (plain.code, drafted.code) == (0, 0), drafted.err
    (one,), (other,) = (json.loads(result.out) for result in (plain, drafted))
    assert one["token_ids"] == other["token_ids"] and len(one["token_ids"]) == 60
    assert_one_sentence(run_verb("run", *flags, "--draft", tmp_path, *asked))
    log = tmp_path / "log"
    with serving(*flags, "--draft", models["small"], log=log) as live:
        body = {"prompt": PROMPTS[1], "max_tokens": 60, "ignore_eos": True}
        reply = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).json()
        assert reply["usage"]["completion_tokens"] == 60
        assert reply["choices"][0]["text"] == one["text"]
        assert "spec_decode_num_accepted_tokens_total" in httpx.get(f"{live.url}/metrics").text
    assert "the draft model takes" in log.read_text()
