"""`dovetail run`: questions in, answers out, from a model; or inputs of one of its workflows.

In: an artifact, or a model, which is compiled into the cache first; prompts as text or token ids,
standard input, or a terminal (`talk.py`); sampling options with vLLM's names.
Out: streamed text, or one JSON object with every completion, or node, and its times.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from dovetail.cli.options import (
    Activations,
    Calibrate,
    Device,
    Dtype,
    GpuMemoryUtilization,
    KvDtype,
    MaxContext,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Offload,
    Trust,
    WeightDtype,
)
from dovetail.cli.report import print_json, report_errors, tell
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.cli.asking import RunResult
    from dovetail.runtime.app import App
    from dovetail.runtime.generator import Prompt

RAW_TOKENS = 64
"""Tokens of a plain text's continuation, which may have no end; answers end by themselves."""
NO_PROMPT = (
    "no prompt: give --prompt TEXT, --prompt-ids 1,2,3, text on standard input, or "
    "--workflow NAME --input TEXT"
)


class WorkflowRun(msgspec.Struct, frozen=True):
    """A run of a workflow as `--json` prints it: all that was written, and when; in seconds."""

    workflow: str
    outputs: dict[str, Any]
    timeline: Sequence[Any]
    seconds: float
    notes: tuple[str, ...] = ()


@report_errors
def run_command(
    model: Annotated[Path, typer.Argument(help="An artifact, a model directory, or a GGUF file.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="A prompt; repeatable. Default: standard input, or a talk."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, no chat.")
    ] = False,
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
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens to generate at most; default the context's, {RAW_TOKENS} of plain text."
        ),
    ] = None,
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
    activations: Activations = "integer",
    device: Device = "auto",
    offload: Offload = "auto",
    dtype: Dtype = "auto",
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    weight_dtype: WeightDtype = "auto",
    calibrate: Calibrate = None,
    kv_dtype: KvDtype = None,
    max_context: MaxContext = None,
    check_weights: Annotated[
        bool, typer.Option("--check-weights", help="Check the hashes of the weights first.")
    ] = False,
    trust: Trust = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a model: one prompt streams, several run as a batch; without any, talk on a terminal."""
    from dovetail.cli.asking import Asker
    from dovetail.cli.model_cache import find_artifact
    from dovetail.cli.talk import show, talk
    from dovetail.loading import load

    talks = not (prompt or prompt_ids or workflow or json) and n == 1 and _on_terminal()
    prompts: list[Prompt] = []
    if workflow is None and not talks:
        prompts = _read_prompts(prompt or [], prompt_ids or [])
    elif prompt or prompt_ids:
        raise SpecError("a workflow makes its own prompts; give --input, or leave --workflow")
    compiled = {
        "weight_dtype": None if weight_dtype == "auto" else weight_dtype,
        "calibrate": calibrate,
        "kv_dtype": kv_dtype,
        "max_context": max_context,
    }
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or [],
        "ignore_eos": ignore_eos,
        "n": n,
    }
    asked: dict[str, Any] = {
        "threads": threads,
        "deterministic": deterministic,
        "activations": activations,
        "device": device,
        "offload": offload,
        "dtype": dtype,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
    }
    artifact = find_artifact(model, compiled)
    with load(artifact, check_weights=check_weights, trust=trust, **asked) as app:
        if workflow is not None:
            _run_workflow(app, workflow, input or [], index or [], json=json)
            return
        texts = talks or any(isinstance(given, str) for given in prompts)
        chats = texts and _has_chats(app, raw=raw, system=system)
        if max_tokens is None:
            max_tokens = app.chat_prompts.context if chats else RAW_TOKENS
        asker = Asker(app, chats, system, options | {"max_tokens": max_tokens})
        if talks:
            talk(asker)
        elif json or len(prompts) > 1 or n != 1:
            results = asker.ask_all(prompts)
            if json:
                print_json(results)
            else:
                _print_batch(results)
        else:
            show(asker.ask(prompts[0]))


def _has_chats(app: App, *, raw: bool, system: str | None) -> bool:
    """Tell whether texts are asked through the chat template; SpecError where they must be."""
    if not raw and app.template is not None:
        return True
    if system is not None:
        why = "--raw leaves it out" if raw else "the model has none"
        raise SpecError(f"--system needs the chat template, and {why}; leave --system")
    if not raw:
        tell("the model has no chat template: prompts are continued as plain text, as by --raw")
    return False


def _run_workflow(
    app: App, name: str, given: Sequence[str], indexes: Sequence[Path], *, json: bool
) -> None:
    """Run a workflow of an artifact and print what it wrote last, or all there is to tell."""
    for path in indexes:
        app.add_index(path)
    workflow = app.find_workflow(name)
    result = app.run(workflow, _read_inputs(workflow.inputs, given))
    if json:
        told = result.timeline, result.seconds, result.notes
        print_json(WorkflowRun(name, dict(result.outputs), *told))
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
        wanted = ", ".join(f"--input {name}=TEXT" for name in names)
        raise SpecError(f"the inputs are not those of the workflow: give {wanted}")
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
            raise SpecError(f"--prompt-ids {text!r} is no list of integers such as 1,2,3") from None
    if prompts:
        return prompts
    if sys.stdin is None or _on_terminal():
        raise SpecError(NO_PROMPT)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SpecError(f"standard input is no UTF-8 text: {error.reason}") from None
    if not text.strip():
        raise SpecError(NO_PROMPT)
    return [text.removesuffix("\n")]


def _print_batch(results: list[RunResult]) -> None:
    from dovetail.cli.asking import show_ids

    for result in results:
        print(f"--- {result.prompt}")
        print(show_ids(result.token_ids) if result.text is None else result.text)
        for note in result.notes:
            tell(note)
