"""`dovetail quickstart`: corpus, index, artifact and answers of the bundled tiny world.

In: nothing. Out: the corpus, its index, the artifact of both small models and two workflows, and
five questions answered from retrieved passages beside the answers without them, with tokens/s.
"""

from __future__ import annotations

import random
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import msgspec

from dovetail.cli.compile import describe_report
from dovetail.cli.index import describe_encoder, describe_index
from dovetail.cli.options import AsJson
from dovetail.cli.report import progress_bars, show_report
from dovetail.cli.serve import HttpFlags
from dovetail.errors import ArtifactError
from dovetail.tiny_world import ENCODER, LLAMA, SEED, corpus, prompts
from dovetail.tiny_world.questions import (
    COMPARISON,
    SINGLE,
    TWO_HOP,
    UNANSWERABLE,
    Question,
    short_answer,
)
from dovetail.tiny_world.scoring import exact_match

if TYPE_CHECKING:
    from dovetail.runtime.app import App
    from dovetail.runtime.flows.events import NodeFinished
    from dovetail.runtime.schedule.request import Completion

ASKED = {SINGLE: 2, TWO_HOP: 1, COMPARISON: 1, UNANSWERABLE: 1}
"""How many questions of each kind are drawn from the dev split."""
SEARCH_SECONDS = 20.0
"""Budget of the schedule search: the models are small."""
Say = Callable[[str], None]


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A question put to the corpus, the passages found and the reply read from them."""

    question: str
    passages: tuple[str, ...]
    reply: str


class AnsweredQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its known answer, the reply without documents and the one from them."""

    question: str
    wanted: str
    workflow: str
    closed_book: str
    hops: tuple[Hop, ...]
    answer: str
    right: bool
    seconds: float


class QuickstartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the quickstart did; rates in tokens per second, times in seconds."""

    artifact: str
    index: str
    passages: int
    index_seconds: float
    compile_seconds: float
    load_seconds: float
    asked: tuple[AnsweredQuestion, ...]
    new_tokens: int
    decode_tokens_per_second: float
    serve: str
    page: str
    report: str


def quickstart_command(
    directory: Annotated[Path, "Directory for the corpus and the artifact."] = Path(
        "build/quickstart"
    ),
    json: AsJson = False,
) -> None:
    """Index the bundled corpus, compile the bundled models, and answer questions from it."""
    from dovetail.cli.inspection import inspect_artifact
    from dovetail.html_report.page import write_report
    from dovetail.loading import load

    say: Say = (lambda _line: None) if json else print
    artifact, index = directory / "app.dove", directory / "idx"
    passages, index_seconds = index_corpus(directory, index, say, quiet=json)
    compile_seconds = compile_app(artifact, index, say, quiet=json)
    start = time.perf_counter()
    with load(artifact) as app:
        load_seconds = time.perf_counter() - start
        say(f"4. loaded in {load_seconds * 1e3:.0f} ms; workflows: {', '.join(app.workflows)};")
        say("   questions drawn from the dev split:")
        reader, asked = QuestionReader(app), []
        for question in draw_questions(corpus.questions("dev")):
            asked.append(reader.ask(question))
            say(describe_asked(asked[-1]))
    written, port = directory.absolute() / "report.html", find_port(HttpFlags.port)
    with progress_bars(quiet=json) as progress:
        write_report(inspect_artifact(artifact), written, None, progress)
    report = QuickstartReport(
        artifact=str(artifact),
        index=str(index),
        passages=passages,
        index_seconds=index_seconds,
        compile_seconds=compile_seconds,
        load_seconds=load_seconds,
        asked=tuple(asked),
        new_tokens=reader.new_tokens,
        decode_tokens_per_second=reader.decode_rate,
        serve=f"dovetail serve {shlex.quote(str(artifact))} --port {port}",
        page=f"http://{HttpFlags.host}:{port}/",
        report=str(written),
    )
    show_report(report, _describe, json=json)


def _describe(report: QuickstartReport) -> str:
    right, path = sum(one.right for one in report.asked), shlex.quote(report.artifact)
    return (
        f"\n{right} of {len(report.asked)} right; {report.decode_tokens_per_second:.0f} tokens/s\n"
        f"Next: dovetail inspect {path}; dovetail run {path} --workflow one-shot --input Q\n"
        f"Chat with model and workflows on an OpenAI-compatible port: {report.serve}\n"
        f"It then has a page to chat and to watch at {report.page}\n"
        f"Report of what was decided: {report.report}"
    )


def index_corpus(directory: Path, index: Path, say: Say, *, quiet: bool) -> tuple[int, float]:
    """Write the corpus, embed and index it; return the number of passages, and seconds."""
    from dovetail.compiler.pipeline import compile_model
    from dovetail.compiler.write.corpus import read_corpus
    from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
    from dovetail.loading import load

    start = time.perf_counter()
    written, encoder = corpus.write(directory)[0], directory / "encoder.dove"
    passages = read_corpus(written)
    say(f"1. {written}: {len(passages)} passages of a synthetic world, and questions beside it")
    say(f"2. indexing them by the bundled encoder, compiled into {encoder}")
    with progress_bars(quiet=quiet) as progress:
        compile_model(ENCODER, output=encoder, effort="none", progress=progress)
        with load(encoder) as app:
            request, entry = IndexRequest(output=index), describe_encoder(app, encoder)
            report = build_index_folder(passages, app, entry, request, progress)
    say(describe_index(report))
    return len(passages), time.perf_counter() - start


def compile_app(artifact: Path, index: Path, say: Say, *, quiet: bool) -> float:
    """Compile models, workflows and index into an artifact, and verify it; return the seconds."""
    from dovetail.compiler.pipeline import compile_model
    from dovetail.runtime.verify import verify_artifact
    from dovetail.workflows import multistep, one_shot

    say(f"3. compiling the bundled Llama and encoder, two workflows and the index into {artifact}")
    models = {"llm": LLAMA, "embedder": ENCODER}
    with progress_bars(quiet=quiet) as progress:
        report = compile_model(
            models,
            output=artifact,
            workflows=[graph(max_tokens=prompts.MAX_TOKENS) for graph in (one_shot, multistep)],
            index=index,
            budget=SEARCH_SECONDS,
            progress=progress,
        )
    say(describe_report(report))
    checked = verify_artifact(artifact)
    if not checked.ok:
        raise ArtifactError("the artifact just written is damaged: " + "; ".join(checked.faults))
    say(f"verified {checked.files} files: hashes match; compatible with this machine")
    return sum(report.seconds.values())


def find_port(wanted: int) -> int:
    """Return the port if it is free now, else one that is."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((HttpFlags.host, wanted))
        except OSError:
            found.bind((HttpFlags.host, 0))
        return int(found.getsockname()[1])


def draw_questions(questions: Sequence[Question]) -> list[Question]:
    """Return a fixed draw of each kind, as many as ASKED says."""
    rng = random.Random(SEED)
    return [
        question
        for kind, count in ASKED.items()
        for question in rng.sample([q for q in questions if q.kind == kind], count)
    ]


class QuestionReader:
    """Answers questions with an app, and counts tokens and how fast they come."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._said: list[Completion] = []

    def ask(self, question: Question) -> AnsweredQuestion:
        """Answer without documents, and with them: in steps what no single passage tells."""
        from dovetail.runtime.flows.events import NodeFinished

        text = question.question
        closed = prompts.CLOSED_BOOK.format(question=text)
        self._said += self._app.generate(closed, max_tokens=prompts.MAX_TOKENS)
        workflow = "multistep" if len(question.steps) > 1 else "one-shot"
        job = self._app.submit_workflow(workflow, {"input": text})
        ended = [event for event in job if isinstance(event, NodeFinished)]
        result = job.result()
        answer = result.outputs["answer"].strip()
        return AnsweredQuestion(
            question=text,
            wanted=question.answer,
            workflow=workflow,
            closed_book=(self._said[-1].text or "").strip(),
            hops=tuple(read_hops(text, ended)),
            answer=answer,
            right=exact_match(short_answer(answer), question.answer),
            seconds=result.seconds,
        )

    @property
    def new_tokens(self) -> int:
        """Tokens of the replies without documents."""
        return sum(len(found.token_ids) for found in self._said)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one of a reply: the median of these replies."""
        rates = [rate for found in self._said if (rate := found.decode_rate) is not None]
        return median(rates) if rates else 0.0


def read_hops(question: str, ended: Sequence[NodeFinished]) -> list[Hop]:
    """Return what was searched for, found and read, search by search; see `dovetail.workflows`."""
    written = {(event.node, event.round): event.value for event in ended}
    return [
        Hop(
            question=str(written.get(("next", round_), question)).strip(),
            passages=tuple(map(str, found)),
            reply=str(written.get(("read", round_)) or written["answer", round_]).strip(),
        )
        for (node, round_), found in sorted(written.items(), key=lambda item: item[0][1])
        if node == "search"
    ]


def describe_asked(asked: AnsweredQuestion) -> str:
    """Return the question, what was read for it, and both replies."""
    lines = [f"\n   Q: {asked.question}   ({asked.workflow}, {asked.seconds * 1e3:.0f} ms)"]
    for hop in asked.hops:
        if asked.workflow == "multistep":
            lines.append(f"      {hop.question}  ->  {hop.reply}")
        lines += [f"      - {text}" for text in hop.passages]
    verdict = "right" if asked.right else f"wrong: it is {asked.wanted}"
    lines.append(f"      closed book: {asked.closed_book}")
    lines.append(f"      open book:   {asked.answer}   [{verdict}]")
    return "\n".join(lines)
