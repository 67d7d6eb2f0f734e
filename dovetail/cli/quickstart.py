"""`dovetail quickstart`: the whole road on the bundled tiny world.

In: nothing. Out: the corpus, the artifacts of the small encoder and the small Llama, and five
questions answered from retrieved passages beside the answers without them, with tokens/s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dovetail.cli.compile import describe_report
from dovetail.cli.report import print_json, progress_bars, report_errors
from dovetail.errors import ArtifactError
from dovetail.tiny_world import ENCODER, LLAMA, corpus, workflows
from dovetail.tiny_world.index import PassageIndex
from dovetail.tiny_world.questions import SINGLE, TWO_HOP, UNANSWERABLE, Question

if TYPE_CHECKING:
    from dovetail.runtime.app import App
    from dovetail.runtime.request import Completion

ASKED = {SINGLE: 2, TWO_HOP: 2, UNANSWERABLE: 1}
"""How many questions of each kind are asked, all from the dev split."""
SEARCH_SECONDS = 20.0
"""Budget of the schedule search: the model is small."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its known answer, the reply without documents and the one from them."""

    question: str
    wanted: str
    workflow: str
    closed_book: str
    answer: workflows.Answer
    right: bool


class QuickstartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the quickstart did; rates in tokens per second, times in seconds."""

    artifact: str
    passages: int
    index_seconds: float
    compile_seconds: float
    load_seconds: float
    asked: tuple[Asked, ...]
    new_tokens: int
    decode_tokens_per_second: float


@report_errors
def quickstart_command(
    directory: Annotated[Path, typer.Option(help="Where the corpus and the artifact go.")] = Path(
        "build/quickstart"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile the bundled model, index the bundled corpus, and answer questions from it."""
    from dovetail.compiler.pipeline import compile_model
    from dovetail.runtime.app import load
    from dovetail.runtime.verify import verify_artifact

    say = (lambda _line: None) if json else print
    artifact = directory / "app.dove"
    written = corpus.write(directory)
    texts = [passage.document for passage in corpus.passages()]
    say(f"1. {written[0]}: {len(texts)} passages of a synthetic world, and questions beside it")
    embedder = directory / "embedder.dove"
    say(f"2. compiling the bundled encoder into {embedder}")
    with progress_bars(quiet=json) as progress:
        say(
            describe_report(
                compile_model(ENCODER, output=embedder, effort="none", progress=progress)
            )
        )
    say(f"3. compiling the bundled Llama into {artifact}")
    with progress_bars(quiet=json) as progress:
        compiled = compile_model(LLAMA, output=artifact, budget=SEARCH_SECONDS, progress=progress)
    say(describe_report(compiled))
    for written_now in (embedder, artifact):
        checked = verify_artifact(written_now)
        if not checked.ok:
            raise ArtifactError(
                "the artifact just written is damaged: " + "; ".join(checked.faults)
            )
        say(f"4. verified {written_now}: {checked.files} files, whole, runs here")
    start = time.perf_counter()
    with load(artifact) as app, load(embedder) as encoder:
        load_seconds = time.perf_counter() - start
        start = time.perf_counter()
        index = PassageIndex(encoder, texts)
        index_seconds = time.perf_counter() - start
        say(f"5. loaded in {load_seconds * 1e3:.0f} ms, indexed in {index_seconds:.2f} s;")
        say("   questions of the dev split:")
        reader = Reader(app)
        asked = []
        for question in pick_questions(corpus.questions("dev")):
            asked.append(ask(reader, index, question))
            say(describe_asked(asked[-1]))
    report = QuickstartReport(
        artifact=str(artifact),
        passages=len(texts),
        index_seconds=index_seconds,
        compile_seconds=sum(compiled.seconds.values()),
        load_seconds=load_seconds,
        asked=tuple(asked),
        new_tokens=reader.new_tokens,
        decode_tokens_per_second=reader.decode_rate,
    )
    if json:
        print_json(report)
        return
    right = sum(one.right for one in asked)
    print(f"{right} of {len(asked)} right; {report.decode_tokens_per_second:.0f} tokens/s decoding")
    print(f"Next: dovetail inspect {artifact}; dovetail run {artifact} --prompt '...'")
    print(f"Chat with it on an OpenAI-compatible port: dovetail serve {artifact} {embedder}")


class Reader:
    """Generates replies with an app, and counts tokens and seconds of decoding."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.new_tokens = self._decoded = 0
        self._seconds = 0.0

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        """Return the replies to `prompts`."""
        found = self._app.generate(list(prompts), max_tokens=workflows.MAX_TOKENS)
        self._count(found)
        return [completion.text or "" for completion in found]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after each reply's first."""
        return self._decoded / self._seconds if self._seconds else 0.0

    def _count(self, completions: Iterable[Completion]) -> None:
        for found in completions:
            first, last = found.metrics.first_token, found.metrics.last_token
            self.new_tokens += len(found.token_ids)
            if first is not None and last is not None:
                self._decoded += len(found.token_ids) - 1
                self._seconds += last - first


def pick_questions(questions: Sequence[Question]) -> list[Question]:
    """Return the first questions of each kind, as many as ASKED says."""
    return [
        question
        for kind, count in ASKED.items()
        for question in [q for q in questions if q.kind == kind][:count]
    ]


def ask(reader: Reader, index: PassageIndex, question: Question) -> Asked:
    """Answer a question without documents, and with them: two-hop questions in several steps."""
    workflow = workflows.multistep if question.kind == TWO_HOP else workflows.one_shot
    answer = workflow(reader, index.search, question.question)
    return Asked(
        question=question.question,
        wanted=question.answer,
        workflow=workflow.__name__,
        closed_book=workflows.closed_book(reader, question.question).reply,
        answer=answer,
        right=workflows.exact_match(answer.short, question.answer),
    )


def describe_asked(asked: Asked) -> str:
    """Return the question, what was read for it, and both replies."""
    lines = [f"\n   Q: {asked.question}   ({asked.workflow})"]
    for hop in asked.answer.hops:
        if len(asked.answer.hops) > 1:
            lines.append(f"      {hop.question}  ->  {hop.reply}")
        lines += [f"      - {text}" for text in hop.passages]
    verdict = "right" if asked.right else f"wrong: it is {asked.wanted}"
    lines.append(f"      closed book: {asked.closed_book}")
    lines.append(f"      open book:   {asked.answer.reply}   [{verdict}]")
    return "\n".join(lines)
