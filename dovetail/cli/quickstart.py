"""`dovetail quickstart`: the whole road on a small random model.

In: nothing. Out: a model directory, its artifact, generated text, and tokens/s beside the roofline.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from dovetail.cli.compile import describe_report
from dovetail.cli.report import print_json, progress_bars, report_errors
from dovetail.cli.run import decode_rate
from dovetail.errors import ArtifactError, SpecError

if TYPE_CHECKING:
    from dovetail.ir.model import ModelFile

PROMPT = "The joint that interlocks two pieces"
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SPECIAL_TOKENS = ("<s>", "</s>")
SEARCH_SECONDS = 20.0
SEED = 0


class QuickstartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the quickstart measured; rates in tokens and bytes per second."""

    artifact: str
    compile_seconds: float
    load_seconds: float
    new_tokens: int
    decode_tokens_per_second: float
    read_bytes_per_second: float
    bytes_per_token: int
    roofline_tokens_per_second: float
    roofline_fraction: float


@report_errors
def quickstart_command(
    directory: Annotated[Path, typer.Option(help="Where the model and the artifact go.")] = Path(
        "build/quickstart"
    ),
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 128,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a small random Llama, compile it, verify the artifact, generate, compare the speed."""
    from dovetail.compiler.pipeline import compile_model
    from dovetail.runtime.verify import verify_artifact

    model, artifact = directory / "tiny-llama", directory / "app.dove"
    say = (lambda _line: None) if json else print
    directory.mkdir(parents=True, exist_ok=True)
    say(f"1. {model}: a Llama of random weights (its text will be noise), byte-level tokenizer")
    make_model(model)
    say(f"2. compiling it into {artifact}")
    with progress_bars(quiet=json) as progress:
        compiled = compile_model(model, output=artifact, progress=progress, budget=SEARCH_SECONDS)
    say(describe_report(compiled))
    checked = verify_artifact(artifact)
    if not checked.ok:
        raise ArtifactError("the artifact just written is damaged: " + "; ".join(checked.faults))
    say(f"3. verified: {checked.files} files, whole, runs here")
    report = generate(artifact, tokens, sum(compiled.seconds.values()), quiet=json)
    if json:
        print_json(report)
    else:
        print(describe_speed(report))
        print(f"Next: dovetail inspect {artifact}; dovetail run {artifact} --prompt '...'")


def make_model(directory: Path) -> None:
    """Write a Llama directory of seeded random weights with a byte-level tokenizer.

    Raises:
        SpecError: transformers or torch is not installed.
    """
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise SpecError(
            f"quickstart makes its model with transformers, and {error.name} is missing: "
            "run pip install 'dovetail[bench]'"
        ) from None
    logging.disable_progress_bar()
    vocabulary = write_tokenizer(directory / "tokenizer.json")
    bos, eos = (vocabulary[token] for token in SPECIAL_TOKENS)
    config = LlamaConfig(vocab_size=len(vocabulary), bos_token_id=bos, eos_token_id=eos, **CONFIG)
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).save_pretrained(directory)


def write_tokenizer(path: Path) -> dict[str, int]:
    """Write a tokenizer of the 256 bytes and two special tokens; return its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*alphabet, *SPECIAL_TOKENS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return vocabulary


def generate(
    artifact: Path, tokens: int, compile_seconds: float, *, quiet: bool
) -> QuickstartReport:
    """Load, stream once, then time a generation beside the read bandwidth measured around it."""
    from dovetail.compiler.roofline import measure_read_bandwidth
    from dovetail.runtime.app import load

    start = time.perf_counter()
    with load(artifact) as app:
        load_seconds = time.perf_counter() - start
        if not quiet:
            print(f"4. loaded in {load_seconds * 1e3:.0f} ms; {PROMPT!r} continues:")
        for chunk in app.stream(PROMPT, max_tokens=min(tokens, 48), ignore_eos=True):
            if not quiet:
                print(chunk.text, end="", flush=True)
        if not quiet:
            print()
        part = next(iter(app.artifact.models.values()))
        threads = app.artifact.service.decode.threads
        before = measure_read_bandwidth(threads)
        (found,) = app.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
        bandwidth = max(before, measure_read_bandwidth(threads))
    rate = decode_rate(found) or 0.0
    moved = bytes_per_token(part.file, len(PROMPT) + tokens // 2)
    return QuickstartReport(
        artifact=str(artifact),
        compile_seconds=compile_seconds,
        load_seconds=load_seconds,
        new_tokens=len(found.token_ids),
        decode_tokens_per_second=rate,
        read_bytes_per_second=bandwidth,
        bytes_per_token=moved,
        roofline_tokens_per_second=bandwidth / moved,
        roofline_fraction=rate * moved / bandwidth,
    )


def bytes_per_token(model: ModelFile, context: int) -> int:
    """Return the bytes a decode step reads: every weight but the tables it looks up, and the KV."""
    looked_up = ("embed", "rope_cos", "rope_sin")
    weights = sum(w.bytes for w in model.weights if w.name not in looked_up)
    spec = model.spec
    element = {"f32": 4, "bf16": 2, "f16": 2}[spec.kv_dtype]
    return weights + 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * element * context


def describe_speed(report: QuickstartReport) -> str:
    """Return the line that puts the speed beside the roofline."""
    return (
        f"5. decode: {report.decode_tokens_per_second:.0f} tokens/s, "
        f"{report.roofline_fraction:.0%} of the {report.roofline_tokens_per_second:.0f} tokens/s "
        f"that the read bandwidth measured now ({report.read_bytes_per_second / 1e9:.1f} GB/s) "
        "allows"
    )
