"""`dovetail run`: prompts in, text out, from an artifact; or inputs of one of its workflows.

In: an artifact, prompts as text or token ids, sampling options with vLLM's names.
Out: streamed text, or one JSON object with every completion, or node, and its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from dovetail.cli.report import print_json, report_errors
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.runtime.app import App
    from dovetail.runtime.request import Completion


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One completion as `dovetail run --json` prints it; times in seconds."""

    prompt: str | Sequence[int]
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    first_token_seconds: float | None
    decode_tokens_per_second: float | None


class WorkflowRun(msgspec.Struct, frozen=True):
    """A run of a workflow as `--json` prints it: all that was written, and when; in seconds."""

    workflow: str
    outputs: dict[str, Any]
    timeline: Sequence[Any]
    seconds: float


@report_errors
def run_command(
    artifact: Annotated[Path, typer.Argument(help="An artifact directory.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(help="A prompt as token ids: 1,2,3; may be repeated.")
    ] = None,
    workflow: Annotated[
        str | None, typer.Option(help="A workflow of the artifact, to run instead of prompts.")
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option(help="What the workflow is given; NAME=TEXT where it has several inputs."),
    ] = None,
    index: Annotated[
        list[Path] | None, typer.Option(help="An index folder that it searches; repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens to choose from, 0 = all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the best token's chance.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop at; repeatable.")] = None,
    n: Annotated[int, typer.Option(help="Completions of each prompt.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Run to the limit.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads, default as planned.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Same bits in any batch, on any threads.")
    ] = False,
    check_weights: Annotated[
        bool, typer.Option("--check-weights", help="Check the hashes of the weights first.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate from an artifact: one prompt streams, several run as a batch."""
    from dovetail.loading import load

    if workflow is not None:
        if prompt or prompt_ids:
            raise SpecError("a workflow makes its own prompts; give --input, or leave --workflow")
        loaded = load(
            artifact, check_weights=check_weights, threads=threads, deterministic=deterministic
        )
        with loaded as app:
            _run_workflow(app, workflow, input or [], index or [], json=json)
        return
    prompts = _read_prompts(prompt or [], prompt_ids or [])
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or [],
        "ignore_eos": ignore_eos,
    }
    asked: dict[str, Any] = {"threads": threads, "deterministic": deterministic}
    with load(artifact, check_weights=check_weights, **asked) as app:
        if json or len(prompts) > 1 or n != 1:
            results = _generate(app, prompts, options | {"n": n})
            if json:
                print_json(results)
            else:
                _print_batch(results)
        else:
            _stream(app, prompts[0], options)


def _run_workflow(
    app: App, name: str, given: Sequence[str], indexes: Sequence[Path], *, json: bool
) -> None:
    """Run a workflow of an artifact and print what it wrote last, or all there is to tell."""
    for path in indexes:
        app.add_index(path)
    workflow = app.find_workflow(name)
    result = app.run(workflow, _read_inputs(workflow.inputs, given))
    if json:
        print_json(WorkflowRun(name, dict(result.outputs), result.timeline, result.seconds))
    else:
        last = workflow.nodes[result.timeline[-1].node]
        print(str(result.outputs[last.output]).strip())


def _read_inputs(names: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Return the inputs by name: the only one as it is, or NAME=TEXT each."""
    if len(names) == len(given) == 1:
        return {names[0]: given[0]}
    pairs = [text.partition("=") for text in given]
    found = {name: text for name, _, text in pairs}
    if len(found) < len(given) or sorted(found) != sorted(names):
        wanted = ", ".join(f"--input {name}=TEXT" for name in names)
        raise SpecError(f"the inputs are not those of the workflow: give {wanted}")
    return found


def _read_prompts(texts: list[str], ids: list[str]) -> list[str | list[int]]:
    prompts: list[str | list[int]] = [*texts]
    for text in ids:
        try:
            prompts.append([int(part) for part in text.split(",")])
        except ValueError:
            raise SpecError(f"--prompt-ids {text!r} is no list of integers such as 1,2,3") from None
    if not prompts:
        raise SpecError(
            "no prompt: give --prompt TEXT, --prompt-ids 1,2,3, or --workflow NAME --input TEXT"
        )
    return prompts


def _generate(
    app: App, prompts: Sequence[str | Sequence[int]], options: dict[str, Any]
) -> list[RunResult]:
    completions = app.generate(prompts, **options)
    each = options["n"]
    return [_result(prompts[i // each], found) for i, found in enumerate(completions)]


def _result(prompt: str | Sequence[int], found: Completion) -> RunResult:
    metrics = found.metrics
    return RunResult(
        prompt=prompt,
        text=found.text,
        token_ids=found.token_ids,
        finish_reason=found.finish_reason,
        first_token_seconds=metrics.ttft,
        decode_tokens_per_second=decode_rate(found),
    )


def decode_rate(found: Completion) -> float | None:
    """Return tokens per second after the first token of a completion, None of a single one."""
    metrics = found.metrics
    if metrics.first_token is None or metrics.last_token is None:
        return None
    seconds = metrics.last_token - metrics.first_token
    return (len(found.token_ids) - 1) / seconds if seconds > 0 else None


def _print_batch(results: list[RunResult]) -> None:
    for result in results:
        print(f"--- {result.prompt}")
        print(_show_ids(result.token_ids) if result.text is None else result.text)


def _stream(app: App, prompt: str | Sequence[int], options: dict[str, Any]) -> None:
    for chunk in app.stream(prompt, **options):
        text = chunk.text if app.tokenizer else _show_ids(chunk.token_ids) + " "
        print(text, end="", flush=True)
    print()


def _show_ids(token_ids: tuple[int, ...]) -> str:
    """Return ids as text, for artifacts that have no tokenizer."""
    return " ".join(map(str, token_ids))
