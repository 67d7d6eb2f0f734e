"""The quickstart's draw of questions, what it shows of a run, and (long) the whole of it."""

from __future__ import annotations

import json
import shlex
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.cli.quickstart import (
    ASKED,
    AnsweredQuestion,
    _describe,
    describe_asked,
    draw_questions,
    find_port,
    read_hops,
)
from dovetail.runtime.flows.events import NodeFinished
from dovetail.runtime.index.documents import Document
from dovetail.tiny_world import corpus
from tests.dovetail.commands import dovetail


def finished(*written: tuple[str, int, object]) -> list[NodeFinished]:
    return [NodeFinished(node, round_, value, 0.0) for node, round_, value in written]


def test_questions_of_all_kinds_are_drawn_alike_each_time() -> None:
    drawn = draw_questions(corpus.questions("dev"))
    assert Counter(q.kind for q in drawn) == ASKED and sum(ASKED.values()) == 5
    assert drawn == draw_questions(corpus.questions("dev"))
    assert {q.split for q in drawn} == {"dev"}
    assert drawn != [q for kind in ASKED for q in corpus.questions("dev") if q.kind == kind][:5]


def test_hops_are_read_search_by_search() -> None:
    one, two = Document(id=1, text="A is B.", title="A"), Document(id=2, text="B is C.")
    steps = finished(
        ("recall", 0, []), ("next", 0, " A? "), ("search", 0, [one]), ("read", 0, " A is B."),
        ("recall", 1, ["A is B."]), ("next", 1, "B?"), ("search", 1, [two]), ("read", 1, "B is C"),
        ("next", 2, "None."), ("answer", 2, "C."),
    )  # fmt: skip
    hops = read_hops("Q?", steps)
    assert [(hop.question, hop.reply) for hop in hops] == [("A?", "A is B."), ("B?", "B is C")]
    assert hops[0].passages == ("A: A is B.",)
    (shot,) = read_hops("Q?", finished(("search", 0, [one, two]), ("answer", 0, " B.")))
    assert (shot.question, shot.reply, len(shot.passages)) == ("Q?", "B.", 2)
    asked = AnsweredQuestion(
        question="Q?",
        wanted="D",
        workflow="multistep",
        closed_book="Unknown.",
        hops=tuple(hops),
        answer="C.",
        right=False,
        seconds=0.01,
    )
    text = describe_asked(asked)
    for words in ("A?  ->  A is B.", "- B is C.", "closed book: Unknown.", "[wrong: it is D]"):
        assert words in text


def test_commands_to_go_on_with_name_paths_as_a_shell_takes_them() -> None:
    report = SimpleNamespace(
        **{"asked": (), "decode_tokens_per_second": 1.0, "artifact": "my files/app.dove"},
        **{"serve": "", "page": "", "report": ""},
    )
    text = _describe(report)  # type: ignore[arg-type]
    assert "dovetail inspect 'my files/app.dove'; dovetail run 'my files/app.dove' --w" in text


def test_a_port_that_is_taken_is_not_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert find_port(taken) not in (taken, 0)
    assert find_port(taken) == taken


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_road(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    result = dovetail("quickstart", "--directory", tmp_path / "my files", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["passages"] == len(corpus.passages()) and report["new_tokens"] > 0
    assert report["decode_tokens_per_second"] > 0
    assert sum(asked["right"] for asked in report["asked"]) >= 3
    for asked in report["asked"]:
        assert asked["hops"] and asked["answer"] and asked["closed_book"]
        assert all(len(hop["passages"]) == 5 for hop in asked["hops"])
    assert dovetail("verify", report["artifact"]).code == 0
    assert shlex.split(report["serve"])[2] == report["artifact"]
    assert report["page"] == f"http://127.0.0.1:{report['serve'].split()[-1]}/"
    assert "<h1>app.dove</h1>" in Path(report["report"]).read_text()
