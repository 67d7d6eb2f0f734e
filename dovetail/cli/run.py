"""`dovetail run`: questions in, answers out, from a model; or inputs of one of its workflows.

In: an artifact, or a model, which is compiled into the cache first; prompts as text or token ids,
standard input, or a terminal (`talk.py`); sampling options with vLLM's names.
Out: streamed text, or one JSON object with every completion, or node, and its times.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from dovetail.cli.options import (
    ArtifactOrModel,
    AsJson,
    Beside,
    CompileFlags,
    EngineFlags,
    Indexes,
    Trust,
    beside_options,
    flag_of,
)
from dovetail.cli.report import print_json, tell
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.cli.talk import Asker
    from dovetail.ir.workflow import Workflow
    from dovetail.runtime.app import App
    from dovetail.runtime.hosting.generator import Prompt

RAW_TOKENS = 64
"""Tokens of a plain text's continuation, which may have no end; answers end by themselves."""
NO_PROMPT = (
    "no prompt: give --prompt TEXT, --prompt-ids 1,2,3, text on standard input, or "
    "--workflow NAME --input TEXT"
)


class WorkflowOutcome(msgspec.Struct, frozen=True):
    """A run of a workflow as `--json` prints it: all that was written, and when; in seconds."""

    workflow: str
    outputs: dict[str, Any]
    timeline: Sequence[Any]
    seconds: float
    notes: tuple[str, ...] = ()
    left: dict[str, str] = {}  # by transformation that was never applied: why it was not


OWN = "Default: the model's own (generation_config.json), else"


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen; the names are those of `App.generate`."""

    PANEL = "Sampling"

    temperature: Annotated[
        float | None, f"Randomness; 0 always takes the most likely token. {OWN} 0."
    ] = None
    top_p: Annotated[
        float | None,
        f"Nucleus sampling: smallest token set with this total probability. {OWN} 1.",
    ] = None
    top_k: Annotated[
        int | None, f"Number of most likely tokens to sample from; 0 for all. {OWN} 0."
    ] = None
    min_p: Annotated[
        float | None,
        f"Minimum probability of a token, relative to the most likely one. {OWN} 0.",
    ] = None
    seed: Annotated[int | None, "Seed of the sampling."] = None
    stop: Annotated[list[str] | None, "Text that ends the answer; repeatable."] = None
    n: Annotated[int, "Number of completions of each prompt."] = 1
    ignore_eos: Annotated[bool, "Generate --max-tokens tokens even if the model ends."] = False


def run_command(
    model: ArtifactOrModel,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Prompt, asked through the model's chat template if it has one; repeatable. "
            "Default: standard input, or a chat.",
        ),
    ] = None,
    system: Annotated[str | None, "System message: instructions for the whole chat."] = None,
    raw: Annotated[bool, "Continue the prompt as plain text, without the chat template."] = False,
    prompt_ids: Annotated[
        list[str] | None, "Prompt as token ids (1,2,3), without the chat template; repeatable."
    ] = None,
    workflow: Annotated[
        str | None,
        "Run a workflow instead of prompts: one of the artifact, or as `serve` takes it.",
    ] = None,
    input: Annotated[
        list[str] | None, "Input of the workflow; NAME=TEXT if it has several; repeatable."
    ] = None,
    index: Indexes = None,
    adapter: Annotated[
        str | None,
        "LoRA adapter that answers: NAME in the artifact, or NAME=DIRECTORY to compile beside the "
        "model.",
    ] = None,
    beside: Beside = None,
    max_tokens: Annotated[
        int | None,
        f"Maximum tokens to generate; default: all that fit, {RAW_TOKENS} for plain text.",
    ] = None,
    *,
    sampling: SamplingFlags,
    engine: EngineFlags,
    compiling: CompileFlags,
    check_weights: Annotated[bool, "Check the hashes of the weights first."] = False,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Ask a model: one prompt streams, several run as a batch; without any, chat on a terminal."""
    from dovetail.cli.model_cache import find_artifact, is_artifact
    from dovetail.loading import load
    from dovetail.runtime.engine.options import EngineOptions
    from dovetail.runtime.index.manifest import read_manifest
    from dovetail.runtime.schedule.request import SamplingParams

    if workflow is None and (input or index):
        raise SpecError("--input and --index are for a workflow; add --workflow NAME")
    if workflow is not None and adapter:
        raise SpecError("--adapter is for prompts; write `adapter` into the nodes' options")
    if workflow is not None and (prompt or prompt_ids):
        raise SpecError("a workflow makes its own prompts; give --input, or omit --workflow")
    if workflow is not None:
        _check_unused(sampling, system=system, raw=raw or None, max_tokens=max_tokens)
    if system is not None and prompt_ids and not prompt:
        raise SpecError("--system goes through the chat template, --prompt-ids do not; omit one")
    talks = not (prompt or prompt_ids or workflow or json) and sampling.n == 1 and _on_terminal()
    asks = workflow is None and not talks
    prompts = _read_prompts(prompt or [], prompt_ids or []) if asks else []
    named = {name: value for name, value in vars(sampling).items() if value is not None}
    most = RAW_TOKENS if max_tokens is None else max_tokens
    SamplingParams.make({**named, "max_tokens": most})  # before a model is fetched and compiled
    EngineOptions(**vars(engine))
    for folder in index or ():
        read_manifest(folder)
    graph = None if workflow is None else _read_graph(workflow, stored=is_artifact(Path(model)))
    name, path, _ = (adapter or "").partition("=")
    compiled = compiling.chosen() | beside_options([adapter] if adapter and path else None, beside)
    artifact = find_artifact(model, compiled)
    with load(artifact, check_weights=check_weights, trust=trust, **vars(engine)) as app:
        if workflow is not None:
            if graph is not None and workflow not in (one.name for one in app.artifact.workflows):
                app.add_workflow(graph)
                workflow = graph.name
            _run_workflow(app, workflow, input or [], index or [], json=json)
            return
        texts = talks or any(isinstance(given, str) for given in prompts)
        if texts and app.generator.tokenizer is None:
            raise SpecError("the model has no tokenizer; give token ids: --prompt-ids 1,2,3")
        chats = texts and _has_chats(app, raw=raw, system=system)
        if max_tokens is None and chats:
            most = app.chat_prompts.context
        options = named | {"max_tokens": most, "adapter": name}
        asker = _make_asker(app, options, system, chats=chats, talks=talks)
        _answer(asker, None if talks else prompts, json=json)


def _check_unused(sampling: SamplingFlags, **more: object) -> None:
    """Raise SpecError for options of prompts, which a workflow would not heed."""
    given = {n: v for n, v in vars(sampling).items() if v not in ([], getattr(SamplingFlags, n))}
    given |= {name: value for name, value in more.items() if value is not None}
    if unused := ", ".join(map(flag_of, given)):
        raise SpecError(
            f"the nodes of a workflow say themselves how they ask; omit {unused}, or --workflow"
        )


def _make_asker(
    app: App, named: Mapping[str, Any], system: str | None, *, chats: bool, talks: bool
) -> Asker:
    """Return what asks the model, by what is `named`, else as the model advises."""
    from dovetail.cli.talk import Asker
    from dovetail.ir.options import advised

    file = next((part.file for part in app.artifact.models.values()), None)
    of_model = advised(file.generation) if file else {}
    return Asker(app, chats, system, choose_sampling(of_model, named, talks=talks and chats))


def choose_sampling(
    of_model: Mapping[str, object], named: Mapping[str, object], *, talks: bool
) -> dict[str, object]:
    """Return how tokens are drawn: as is asked, else as the model advises; in talks never dully."""
    from dovetail.ir.options import LIVELY

    silent = LIVELY.keys().isdisjoint(of_model.keys() | named.keys())
    return {**(LIVELY if talks and silent else {}), **of_model, **named}


def _answer(asker: Asker, prompts: list[Prompt] | None, *, json: bool) -> None:
    """Print the answers to prompts; None: talk on the terminal."""
    from dovetail.cli.talk import show, show_ids, talk

    if prompts is None:
        talk(asker)
    elif json:
        print_json(asker.ask_all(prompts))
    elif len(prompts) > 1 or asker.options["n"] != 1:
        for result in asker.ask_all(prompts):
            print(f"--- {result.prompt}")
            print(show_ids(result.token_ids) if result.text is None else result.text)
            for note in result.notes:
                tell(note)
    else:
        show(asker.ask(prompts[0]))


def _has_chats(app: App, *, raw: bool, system: str | None) -> bool:
    """Tell whether texts are asked through the chat template; SpecError where they must be."""
    if not raw and app.template is not None:
        return True
    if system is not None:
        why = "--raw does not use it" if raw else "the model has none"
        raise SpecError(f"--system needs the chat template, but {why}; omit --system")
    if not raw:
        tell("the model has no chat template; prompts are continued as plain text, as with --raw")
    return False


def _read_graph(text: str, *, stored: bool) -> Workflow | None:
    """Return the workflow that a text names, None where the artifact alone may know it.

    stored: there is an artifact. Raises SpecError where it is no workflow, or a file of several.
    """
    from dovetail.cli.workflow_files import is_bundled, read_graphs

    if stored and not is_bundled(text) and not Path(text).is_file():
        return None
    graphs = read_graphs(text)
    if len(graphs) != 1:
        names = ", ".join(graph.name for graph in graphs) or "none"
        raise SpecError(f"{text} must have one workflow to run, and has {names}; give it alone")
    return graphs[0]


def _run_workflow(
    app: App, name: str, given: Sequence[str], indexes: Sequence[Path], *, json: bool
) -> None:
    """Run a workflow that the app knows and print what it wrote last, or all there is to tell."""
    from dovetail.runtime.server.edge import encode_written

    for path in indexes:
        app.add_index(path)
    workflow = app.find_workflow(name)
    result = app.run(workflow, _read_inputs(workflow.inputs, given))
    if json:
        left = {name: why.said for name, why in result.left.items()}
        facts = result.timeline, result.seconds, result.notes, left
        print_json(encode_written(WorkflowOutcome(name, dict(result.outputs), *facts)))
    else:
        for note in result.notes:
            tell(note)
        last = workflow.nodes[result.timeline[-1].node]
        print(str(result.outputs[last.output]).strip())


def _read_inputs(names: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Return the inputs by name: the only one as it is, or NAME=TEXT each."""
    if len(names) == len(given) == 1:
        return {names[0]: given[0]}
    pairs = [text.partition("=") for text in given]
    found = {name: text for name, _, text in pairs}
    if len(found) < len(given) or sorted(found) != sorted(names):
        several = [f"--input {name}=TEXT" for name in names]  # a single text is taken as it is
        wanted = "--input TEXT once" if len(names) == 1 else ", ".join(several)
        raise SpecError(f"the inputs do not match the workflow; give {wanted}")
    return found


def _on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _read_prompts(texts: list[str], ids: list[str]) -> list[Prompt]:
    """Return the prompts, standard input where none is given; SpecError where that has none."""
    prompts: list[Prompt] = [*texts]
    for text in ids:
        try:
            prompts.append([int(part) for part in text.split(",")])
        except ValueError:
            raise SpecError(
                f"--prompt-ids {text!r} is not a list of integers such as 1,2,3"
            ) from None
    if prompts:
        return prompts
    if sys.stdin is None or _on_terminal():
        raise SpecError(NO_PROMPT)
    try:
        text = sys.stdin.read()
        text.encode()  # where the locale lets other bytes pass, as surrogates
    except UnicodeError:
        raise SpecError("standard input is not UTF-8 text") from None
    if not text.strip():
        raise SpecError(NO_PROMPT)
    return [text.removesuffix("\n")]
