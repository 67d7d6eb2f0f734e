"""Drafted tokens change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule import experience, speculation
from dovetail.tiny_world import LLAMA
from tests.runtime.schedule.integrity import check_integrity

DRAFTS = {"method": "suffix", "num_speculative_tokens": 8}
_draw = random.Random(26)
PROMPTS = [[_draw.randrange(2, 90) for _ in range(n)] * 2 for n in (9, 30, 1, 17, 50, 8)]
FORM = {
    "json": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "first_name": {"type": "string", "maxLength": 6},
                "reliable": {"type": "boolean"},
            },
            "required": ["first_name", "reliable"],
            "additionalProperties": False,
        },
        "minItems": 2,
        "maxItems": 3,
    }
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speculation") / "tiny.dove"
    limits = {"max_step_tokens": 64, "max_step_sequences": 32, "max_context": 256}
    compile_model(LLAMA, output=path, effort="none", weight_dtype="f32", **limits)
    return path


def open_app(path: Path, drafts: bool, **options: Any) -> App:
    """Steps take as long with drafts as without on this clock, so that all are tried."""
    app = load(path, speculative_config=DRAFTS if drafts else None, **options)
    clock = itertools.count()
    app.engine.scheduler.clock = lambda: float(next(clock))
    if drafts:
        app.engine.scheduler.speculation.share = math.inf
    return app


def count(app: App, name: str) -> int:
    found = app.engine.scheduler.speculation
    return found.counts[name] if found else 0


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.4, "seed": 5, "top_p": 0.9},
    "several samples": {"temperature": 0.7, "seed": 3, "n": 3, "logprobs": 2},
    "ends": {"ignore_eos": False, "stop_token_ids": [40, 41, 42, 43, 44, 45, 46, 47]},
    "short": {"max_tokens": 7},
    "penalised": {"repetition_penalty": 1.05, "presence_penalty": 0.2, "logprobs": 1},
    "form": {"structured_outputs": FORM, "ignore_eos": False, "logprobs": 1},
    "drawn form": {"structured_outputs": FORM, "temperature": 0.9, "seed": 2, "top_p": 0.9},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"kv_blocks": 20, "threads": 1}], ids=["", "preempted"])
def test_deterministic_loads_give_the_same_tokens(
    tiny: Path, case: str, options: dict[str, Any]
) -> None:
    asked = {"max_tokens": 60, "ignore_eos": True, **CASES[case]}
    if options and "n" in asked:
        asked["n"] = 2
    found = []
    for drafts in (False, True):
        with open_app(tiny, drafts, deterministic=True, **options) as app:
            alone = app.generate(PROMPTS[0], **asked)
            done = [*alone, *app.generate(PROMPTS, **asked), *app.generate(PROMPTS[1], **asked)]
            found.append([(d.token_ids, d.finish_reason, d.text, d.logprobs) for d in done])
            check_integrity(app.engine.scheduler)
            preempted = sum(d.metrics.preemptions for d in done)
            assert preempted == 0 or options
            if drafts and case == "greedy":
                assert count(app, "accepted_tokens") > 50, "the model repeats itself"
                assert bool(preempted) == bool(options)
            if drafts and case in ("penalised", "form", "drawn form"):
                assert count(app, "accepted_tokens") > 20
    assert found[0] == found[1]


def test_what_a_stop_text_cuts_off_is_not_there(tiny: Path) -> None:
    with open_app(tiny, False, deterministic=True) as app:
        (whole,) = app.generate(PROMPTS[1], max_tokens=60, ignore_eos=True)
        assert whole.text
        stops = [whole.text[:at] for at in range(9, len(whole.text), 11)]  # found at their end
        asked = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0}
        expected = [app.generate(PROMPTS[1], stop=stop, **asked)[0] for stop in stops]
    with open_app(tiny, True, deterministic=True) as app:
        for stop, plain in zip(stops, expected, strict=True):
            (done,) = app.generate(PROMPTS[1], stop=stop, **asked)
            assert (done.text, done.token_ids) == (plain.text, plain.token_ids)
            assert (done.finish_reason, done.logprobs) == (plain.finish_reason, plain.logprobs)
        assert count(app, "accepted_tokens") > 20


def test_an_answer_that_quotes_takes_fewer_steps(tiny: Path) -> None:
    """Fails if nothing is drafted: the steps are counted."""
    steps = [count_steps(tiny, drafts, max_tokens=60, ignore_eos=True) for drafts in (False, True)]
    assert steps[0] >= 60 and steps[1] < steps[0] / 2


def test_what_a_schema_forces_takes_fewer_steps(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if forced tokens are not drafted: nothing is looked up."""
    monkeypatch.setattr(speculation, "SHORT", 1000)
    asked = {"structured_outputs": {**FORM, "disable_any_whitespace": True}, "max_tokens": 90}
    steps = [count_steps(tiny, drafts, **asked) for drafts in (False, True)]
    assert steps[1] < 0.8 * steps[0]


def test_drafts_for_a_request_alone_change_no_bit_of_other_loads(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Rows round and sum alike however many there are; int4 weights would show each other bit."""
    path = tmp_path_factory.mktemp("ties") / "int4.dove"
    limits = {"max_step_tokens": 64, "max_step_sequences": 32, "max_context": 256}
    compile_model(LLAMA, output=path, effort="none", weight_dtype="int4", **limits)
    asked = {"max_tokens": 60, "ignore_eos": True, "logprobs": 5}
    found = []
    for drafts in (False, True):
        with open_app(path, drafts, threads=2) as app:
            done = [app.generate(prompt, **asked)[0] for prompt in PROMPTS]
            found.append([(one.token_ids, one.logprobs) for one in done])
            assert not drafts or count(app, "accepted_tokens") > 50
    assert found[0] == found[1]


def count_steps(path: Path, drafts: bool, **asked: Any) -> int:
    with open_app(path, drafts) as app:
        engine, ran = app.engine, itertools.count()
        step: Callable[[], Any] = engine.step
        engine.step = lambda: (next(ran), step())[1]  # type: ignore[method-assign]
        app.generate(PROMPTS[1], **asked)
        return next(ran)


def test_the_engine_in_a_process_of_its_own_drafts_and_tells_it(tiny: Path) -> None:
    asked = {"max_tokens": 60, "ignore_eos": True}
    with load(tiny, deterministic=True) as app:
        (plain,) = app.generate(PROMPTS[1], **asked)
        stop = plain.text[40:43]
        (cut,) = app.generate(PROMPTS[1], stop=stop, **asked)
    with load(tiny, deterministic=True, speculative_config=DRAFTS, apart=True) as app:
        assert app.generate(PROMPTS[1], **asked)[0].token_ids == plain.token_ids
        (done,) = app.generate(PROMPTS[1], stop=stop, **asked)
        assert (done.token_ids, done.text) == (cut.token_ids, cut.text)
        assert set(app.generator.host.load.drafts) <= {"drafts", "draft_tokens", "accepted_tokens"}


def test_rejected_rows_leave_no_trace(
    make_artifact: Callable[..., Path],
    answer: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The toy model answers wrongly as soon as one slot is; nearly no draft of its text holds."""
    monkeypatch.setattr(speculation, "SHORT", 1)
    monkeypatch.setattr(experience, "PRIOR", 1e9)  # no experience makes it give up
    rng = random.Random(4)
    prompts = [[rng.randrange(9) for _ in range(rng.randint(1, 90))] for _ in range(14)]
    for blocks in (16, 64):
        path = make_artifact(kv_blocks=blocks, name=f"{blocks}.dove")
        with open_app(path, True) as app:
            for n in (1, 14):
                done = app.generate(prompts[:n], max_tokens=60)
                assert [list(d.token_ids) for d in done] == [answer(p, 60) for p in prompts[:n]]
            assert count(app, "draft_tokens") > count(app, "accepted_tokens") + 20
            check_integrity(app.engine.scheduler.pool)
