"""Generations of workflows on the app's engine, and what is seen of them.

In: orders to generate and to cancel. Out: reports to the control plane, and pieces of text to those
who watch. Nothing of a provisional reply is shown before it is known to be a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from dovetail.ir.errors import CapacityError, DovetailError, RequestError
from dovetail.ir.workflow import Generation
from dovetail.runtime.flows.control import messages
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.prompts import FilledPrompt, fit
from dovetail.runtime.flows.recorder import FIRST_FLOW
from dovetail.runtime.hosting.generator import Generator, Job, Prompt
from dovetail.runtime.schedule.request import Chunk, SamplingParams
from dovetail.runtime.schedule.speculation import MOST_BESIDE
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text.answers import AnswerParser, Content
from dovetail.runtime.text.call_grammar import frame, write_mark

Show: TypeAlias = Callable[[messages.Source, Chunk], None]
Note: TypeAlias = Callable[[messages.Source, str, str | None], None]
"""Takes what is to be said of a prompt, and what was sent instead of it."""
Watcher: TypeAlias = Callable[[messages.Source], WorkflowJob | None]
"""The job of a request whose events somebody may read."""


@dataclass(slots=True)
class _Generation:
    """A generation. reported: tokens at the last report of progress.

    prompt: what is left to read of it. parser: reads reasoning off its reply. job: None while the
    engine has no room for it. hidden: what may not be shown yet. note: what is to be said of its
    prompt; sent: what was sent instead of it, where it is a text and documents were cut.
    """

    order: messages.Generate
    prompt: str
    hidden: list[Chunk] | None
    parser: AnswerParser | None = None
    job: Job | None = None
    note: str | None = None
    sent: str | None = None
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    reported: int = 0
    over: bool = False


class Generations:
    """All generations of workflows. For the driver's thread alone."""

    def __init__(
        self,
        generator: Generator | None,
        tell: Callable[[messages.Report], None],
        show: Show,
        note: Note,
        watcher: Watcher,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`later` has a function called soon on the driver's thread; it is called on any."""
        self._generator, self._tell, self._later = generator, tell, later
        self._show, self._note, self._watcher = show, note, watcher
        self._replies: dict[int, _Generation] = {}
        self._held: dict[int, None] = {}  # refused because too many requests wait, the first first

    @property
    def held(self) -> bool:
        """Whether some wait for room in the engine's queue; `retry` starts them."""
        return bool(self._held)

    @property
    def waiting(self) -> int:
        """How many wait: for room in the engine's queue, or there, beside requests of others."""
        return len(self._held) + (self._generator.host.load.waiting if self._generator else 0)

    @property
    def requests(self) -> set[int]:
        """Those that have a generation here, a guess too."""
        return {reply.order.source.request for reply in self._replies.values()}

    def begin(self, order: messages.Generate) -> None:
        """Start a generation; what is wrong with it is reported."""
        hidden = list[Chunk]() if order.provisional else None
        self._replies[order.job] = _Generation(order, order.prompt, hidden)
        if self._held:
            self._held[order.job] = None
        else:
            self._start(order.job)

    def reveal(self, job: int) -> None:
        """Show what was hidden, and what comes: the generation is a real one now."""
        reply = self._replies.get(job)
        if reply is None or reply.hidden is None:
            return
        chunks, reply.hidden = reply.hidden, None
        self._tell_note(reply)
        for chunk in chunks:
            self._show(reply.order.source, chunk)
        if reply.over:
            del self._replies[job]

    def cancel(self, job: int) -> None:
        """End a generation, if there is one of that number."""
        self._held.pop(job, None)
        reply = self._replies.pop(job, None)
        if reply is not None and reply.job is not None and self._generator is not None:
            self._generator.drop([reply.job])

    def forget(self, request: int) -> None:
        """End all of a request that is over; a guess of it may never be revealed."""
        for job, reply in tuple(self._replies.items()):
            if reply.order.source.request == request:
                self.cancel(job)

    def retry(self) -> None:
        """Start those that were refused, in order, as far as there is room now."""
        for job in tuple(self._held):
            if not self._start(job):
                return
            del self._held[job]

    # ---- one generation ----

    def _start(self, job: int) -> bool:
        """Have the engine reply; False where it has no room for that now."""
        reply = self._replies[job]
        try:
            if self._generator is None:
                raise RequestError("the app has no model that generates")
            if isinstance(reply.prompt, FilledPrompt) and reply.prompt.messages:
                self._render(job, self._generator, reply.prompt)
                return True
            flow = FIRST_FLOW + reply.order.source.request
            options = _read_options(self._generator, reply)
            prompt, beside = _read_prompt(self._generator, reply)
            watcher, steps = self._watcher(reply.order.source), reply.order.steps
            chunks = watcher is not None or steps > 0
            asked = self._generator.read([prompt], options, single=True, chunks=chunks, flow=flow)
            (started,) = self._generator.accept(replace(asked, beside=tuple(beside)))
        except Exception as error:  # whatever a prompt of users does to a tokenizer
            return self._refused(job, messages.as_ours(error))
        reply.job = started
        self._tell_note(reply)
        started.watch(
            lambda: self._later(lambda: self._take_news(job, started)),
            lambda: steps > 0 or (watcher is not None and watcher.read),
        )
        return True

    def _render(self, job: int, generator: Generator, prompt: FilledPrompt) -> None:
        """Have the chat template make a text of messages; the generation starts with that."""
        if generator.template is None:
            raise RequestError("the model has no chat template, so a prompt must be a text")
        future = generator.template.start(prompt.mark())
        future.add_done_callback(lambda _: self._later(lambda: self._begin_with(job, future)))

    def _begin_with(self, job: int, rendered: Future[str]) -> None:
        reply, generator = self._replies.get(job), self._generator
        if reply is None or generator is None or not isinstance(reply.prompt, FilledPrompt):
            return
        try:
            text = rendered.result()
        except Exception as error:
            self._refused(job, messages.as_ours(error))
            return
        reply.prompt = reply.prompt.place(text)
        begun = generator.style.begins_thinking(reply.prompt)
        if generator.style.thinking is not None:
            reply.parser = generator.style.parser(begun=begun)
        self._start(job)

    def _tell_note(self, reply: _Generation) -> None:
        if reply.note is not None and reply.hidden is None:
            self._note(reply.order.source, reply.note, reply.sent)

    def _refused(self, job: int, error: DovetailError) -> bool:
        """Report an error, unless all that is wrong is that others are first."""
        if isinstance(error, CapacityError) and error.retry_after is not None:
            self._replies[job].job = None
            self._held[job] = None  # which keeps its place, if it has one
            return False
        del self._replies[job]
        self._tell(messages.Failed(job, error))
        return True

    def _take_news(self, job: int, started: Job) -> None:
        reply = self._replies.get(job)
        if reply is None or reply.job is not started:
            return
        finished = started.finished  # before the last chunks are taken, not after
        if (chunk := started.take()) is not None:
            if reply.parser is not None:
                chunk = replace(chunk, text=_content(reply.parser, chunk))
            reply.pieces.append(chunk.text)
            reply.tokens += len(chunk.token_ids)
            if reply.hidden is None:
                self._show(reply.order.source, chunk)
            else:
                reply.hidden.append(chunk)
        if finished:
            self._end(job, started)
        elif reply.order.steps and reply.tokens - reply.reported >= reply.order.steps:
            reply.reported = reply.tokens
            self._tell(messages.Progressed(job, "".join(reply.pieces), reply.tokens))

    def _end(self, job: int, started: Job) -> None:
        try:
            done = started.result()
        except DovetailError as error:
            self._refused(job, error)
            return
        reply = self._replies[job]
        if reply.hidden is None:
            del self._replies[job]
        else:  # kept for the day it is revealed, or its request is forgotten
            reply.over = True
        text = "".join(reply.pieces) if reply.parser is not None else done.text or ""
        self._tell(messages.Finished(job, text))
        self.retry()


def prepare_generation(generator: Generator, node: Generation) -> None:
    """Have the chat template and the grammar known that a node needs.

    Raises RequestError where there is none, or the form of its reply cannot be followed.
    """
    chats = not isinstance(node.prompt, str)
    if chats and generator.template is None:
        raise RequestError("the model has no chat template, so a prompt must be a text")
    for begun in (False, True):
        if (form := _find_form(generator, node, chats=chats, begun=begun)) is not None:
            generator.forms.pin(form)


def _find_form(
    generator: Generator, node: Generation, *, chats: bool, begun: bool
) -> StructuredOutputs | None:
    """Return the form of a node's reply: in a chat with the reasoning that may go before it."""
    form = SamplingParams.make(node.options).structured_outputs
    tokenizer = generator.tokenizer
    if form is None or tokenizer is None or not chats:
        return form
    literal = partial(write_mark, tokenizer)
    return frame(form, generator.style.thinking, literal, begun=begun)


def _read_options(generator: Generator, reply: _Generation) -> Mapping[str, object]:
    """Return a node's options, its form as `prepare_generation` knows it."""
    node, prompt, tokenizer = reply.order.node, reply.prompt, generator.tokenizer
    options = dict(node.options)
    if reply.parser and tokenizer and generator.style.has_special_marks(tokenizer):
        options["skip_special_tokens"] = False  # the parser takes them away
    if not options.keys() & {"schema", "structured_outputs"}:
        return options
    chats = not isinstance(node.prompt, str)
    begun = chats and generator.style.begins_thinking(prompt)
    form = _find_form(generator, node, chats=chats, begun=begun)
    options.pop("schema", None)
    return {**options, "structured_outputs": form}


def _read_prompt(generator: Generator, reply: _Generation) -> tuple[Prompt, list[int]]:
    """Return the prompt as the engine takes it, and what its answer may quote of other documents.

    Sets what is told where documents were cut.
    """
    node, tokenizer = reply.order.node, generator.tokenizer
    if tokenizer is None:
        return reply.prompt, []  # which is told of where it is read
    answer = SamplingParams.make(node.options).max_tokens
    limits = generator.context, answer, node.documents_tokens
    found = fit(reply.prompt, tokenizer, *limits)
    if found.note is not None and (plain := getattr(reply.prompt, "plain", None)) is not None:
        found = fit(plain, tokenizer, *limits)  # the nearest are to stay
    reply.note = found.note
    reply.sent = found.prompt if getattr(reply.prompt, "special", True) else None
    beside = [*found.cut, *getattr(reply.prompt, "beside", ())] if generator.host.drafts else []
    text = tokenizer.cut("\n".join(beside), MOST_BESIDE) if beside else ""
    return found.ids, tokenizer.encode(text, special=False) if text else []


def _content(parser: AnswerParser, chunk: Chunk) -> str:
    """Return what a piece of a reply says to the user."""
    parts = parser.feed(chunk.text)
    parts += parser.close() if chunk.finish_reason else []
    return "".join(part.text for part in parts if isinstance(part, Content))
