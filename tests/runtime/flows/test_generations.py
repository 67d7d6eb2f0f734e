"""Generations of workflows: what is told of them, and what is shown, and when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest

from dovetail.ir.errors import RequestError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Generation
from dovetail.runtime.app import App
from dovetail.runtime.flows.control.messages import (
    Failed,
    Finished,
    Generate,
    Progressed,
    Report,
    Source,
)
from dovetail.runtime.flows.generations import Generations
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.hosting.wire import Ask
from dovetail.runtime.schedule.plan import SchedulerSettings
from tests.runtime.throttle import Throttle

NODE = Generation("say", "", "answer", {"max_tokens": 20, "ignore_eos": True})
PROMPT = "w1 w2 w3"


def follow() -> WorkflowJob:
    """Return the job of a run whose events may be read."""
    graph = RAGraph("say")
    graph.add_generation("say", prompt="{input}")
    graph.add_edge(START, "say")
    graph.add_edge("say", END)
    return WorkflowJob(graph.workflow(), lambda _: None, events=True)


class Desk:
    """Takes what generations tell and show, as a session would."""

    def __init__(self, app: App, watched: WorkflowJob | None = None) -> None:
        """`watched`: the job whose events may be read."""
        self.told: list[Report] = []
        self.shown: list[str] = []
        self.notes: list[str] = []
        self._later: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.generations = Generations(
            app.generator,
            self.told.append,
            lambda source, chunk: self.shown.append(chunk.text),
            lambda source, note, sent: self.notes.append(note),
            lambda _: watched,
            self._later.put,
        )

    def order(self, job: int, prompt: str = PROMPT, *, steps: int = 0, guess: bool = False) -> None:
        source = Source(1, NODE.name, 0)
        self.generations.begin(Generate(job, source, NODE, prompt, steps, guess))

    def catch_up(self) -> None:
        """Do what is to be done by now."""
        while not self._later.empty():
            self._later.get()()

    def wait(self) -> Report:
        """Return the report that ends a generation."""
        while not self.told or isinstance(self.told[-1], Progressed):
            self._later.get()()
        return self.told[-1]


def test_progress_is_told_every_few_steps_and_text_shown_as_it_comes(app: App) -> None:
    (wanted,) = app.generate(PROMPT, **NODE.options)
    for _ in range(100):  # a busy machine may show all at once
        desk = Desk(app)
        desk.order(1, steps=4)
        assert desk.wait() == Finished(1, wanted.text)
        assert "".join(desk.shown) == wanted.text
        if len(desk.shown) > 1:
            break
    else:
        raise AssertionError("text is shown at its end only")
    grown = [report for report in desk.told if isinstance(report, Progressed)]
    assert all(wanted.text and wanted.text.startswith(report.text) for report in grown)
    counts = [0, *(report.tokens for report in grown)]
    assert all(b - a >= 4 for a, b in pairwise(counts))


def test_text_that_nobody_reads_comes_at_the_end_alone(app: App) -> None:
    """With events and without: a message for each token would cost as much as the token."""
    (wanted,) = app.generate(PROMPT, **NODE.options)
    for watched in (None, follow()):
        desk = Desk(app, watched)
        desk.order(1)
        assert desk.wait() == Finished(1, wanted.text)
        assert desk.shown == [wanted.text]


def test_who_begins_to_read_gets_all_text_from_then_on(app: App) -> None:
    throttle, job = Throttle(app), follow()
    desk = Desk(app, job)
    desk.order(1)
    throttle.run(6)
    assert not desk.shown
    job.fail(RequestError("so that its events end"))
    with pytest.raises(RequestError):
        list(job)
    throttle.run(2)
    desk.catch_up()
    assert desk.shown and desk.shown[0]
    throttle.allow(100)
    assert isinstance(done := desk.wait(), Finished)
    assert "".join(desk.shown) == done.value


def test_a_guess_shows_nothing_until_it_is_revealed(app: App) -> None:
    desk = Desk(app)
    desk.order(1, guess=True)
    done = desk.wait()
    assert isinstance(done, Finished) and not desk.shown
    desk.generations.reveal(1)
    assert "".join(desk.shown) == done.value
    desk.generations.reveal(1)
    assert "".join(desk.shown) == done.value


def test_a_guess_that_fails_to_hold_is_never_shown(app: App) -> None:
    desk = Desk(app)
    desk.order(1, guess=True)
    desk.wait()
    desk.generations.forget(1)
    desk.generations.reveal(1)
    assert not desk.shown


def test_what_is_cancelled_while_it_is_held_waits_no_more(open_app: Callable[..., App]) -> None:
    """The engine takes no step: one generation fills its queue, and the others are held."""
    app = open_app(settings=SchedulerSettings(max_waiting=1))
    Throttle(app)
    desk = Desk(app)
    desk.order(1)
    app.generator.host.call(lambda: None).result()
    for job in (2, 3, 4):
        desk.order(job)
    assert desk.generations.waiting == 4
    for job in (3, 4):
        desk.generations.cancel(job)
    assert desk.generations.waiting == 2
    desk.generations.retry()
    assert desk.generations.waiting == 2 and desk.generations.held and not desk.told


def test_a_prompt_that_cannot_be_read_is_told_of(app: App) -> None:
    desk = Desk(app)
    desk.order(1, prompt="w1 " * 400)
    failed = desk.wait()
    assert isinstance(failed, Failed) and "256" in str(failed.error)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_documents_that_a_prompt_does_not_show_are_looked_up_where_tokens_are_drafted(
    open_app: Callable[..., App], monkeypatch: pytest.MonkeyPatch, drafts: bool, apart: bool
) -> None:
    """Of a search before, and those that its own budget has cut."""
    config = {"speculative_config": {"method": "suffix"}} if drafts else {}
    app = open_app(apart=apart, **config)
    asked: list[Ask] = []
    begin = type(app.generator.host).begin

    def keep(host: Any, ask: Ask, jobs: Any) -> None:
        asked.append(ask)
        begin(host, ask, jobs)

    graph = RAGraph("quote")
    graph.add_retrieval("first", query="input", output="old", topk=2)
    graph.add_retrieval("second", query="input", output="docs", topk=5)
    prompt = "{docs} w1"
    graph.add_generation("say", prompt=prompt, documents_tokens=4, max_tokens=6, ignore_eos=True)
    for source, target in pairwise((START, "first", "second", "say", END)):
        graph.add_edge(source, target)
    app.run(graph, {"input": "w5"})  # it measures first what steps cost
    monkeypatch.setattr(type(app.generator.host), "begin", keep)
    result = app.run(graph, {"input": "w1 w2"})
    (ask,) = (one for one in asked if one.params.max_tokens == 6)
    assert app.tokenizer is not None
    beside = app.tokenizer.decode(ask.beside).split()
    shown = app.tokenizer.decode(ask.prompts[0]).split()
    found = [*result.outputs["old"], *result.outputs["docs"]]
    every = {word for document in found for word in document.text.split()}
    assert every <= {*beside, *shown} if drafts else not beside
    (alone,) = app.generate([ask.prompts[0]], max_tokens=6, ignore_eos=True)
    assert alone.text == result.outputs["answer"]
