"""`dovetail index build`: a corpus and an encoder to an index folder, with a bar and an ETA.

In: JSON lines, JSON, Markdown or text, and a model directory or artifact that embeds. Out: a folder
that `dovetail.runtime.retrieval.folder.open_index` opens.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail import __version__
from dovetail.cli.options import AsJson, Threads
from dovetail.cli.report import (
    Terminated,
    fail,
    print_json,
    progress_bars,
    report_errors,
    show_bytes,
)
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.compiler.index_build import IndexReport, Progress


@report_errors
def index_build_command(
    corpus: Annotated[
        Path, typer.Argument(help="A file (*.jsonl, *.json, *.md, *.txt, also .gz), or a folder.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The index folder to write.")],
    embedder: Annotated[
        Path, typer.Option(help="A model directory of an encoder, or its artifact.")
    ],
    codes: Annotated[
        str, typer.Option(help="How vectors are stored: flat, sq8 (a quarter) or pq (a 16th).")
    ] = "flat",
    metric: Annotated[
        str | None,
        typer.Option(help="l2 or ip (inner product); default ip where vectors have length 1."),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Clusters, 1 = flat; default by the number of passages.")
    ] = None,
    words: Annotated[
        int, typer.Option(min=1, help="Words of a passage of Markdown or text at most.")
    ] = 200,
    seed: Annotated[int, typer.Option(help="Of the clustering.")] = 0,
    threads: Threads = None,
    json: AsJson = False,
) -> None:
    """Build an index of a corpus; run again after an interruption, it goes on where it was."""
    try:
        report = _build(corpus, output, embedder, codes, metric, clusters, words, seed, threads)
    except (KeyboardInterrupt, Terminated):
        fail("interrupted; run the same command again to go on with the passages left")
    if json:
        print_json(report)
    else:
        print(describe_index(report))


def describe_index(report: IndexReport) -> str:
    """Return the lines a person reads after a build."""
    kind = "flat" if report.clusters == 1 else f"{report.clusters} clusters"
    again = f" ({report.resumed} by an interrupted build before)" if report.resumed else ""
    return (
        f"{report.path}: {report.documents} passages{again}, {report.dim} values each by "
        f"{report.embedder}; {kind}, {report.codes}, {report.metric}, {show_bytes(report.bytes)}"
    )


def _build(
    corpus: Path,
    output: Path,
    embedder: Path,
    codes: str,
    metric: str | None,
    clusters: int | None,
    words: int,
    seed: int,
    threads: int | None,
) -> IndexReport:
    from dovetail.codegen.targets import host_target
    from dovetail.compiler.corpus import read_corpus
    from dovetail.compiler.index_build import IndexRequest, build_index_folder, describe_embedder
    from dovetail.runtime.app import load

    passages = read_corpus(corpus, words)
    with progress_bars() as progress, load(_open(embedder, progress), threads=threads) as app:
        if not app.artifact.encoders:
            raise SpecError(f"{embedder} has no encoder; give a model that embeds texts")
        spec = next(iter(app.artifact.encoders.values())).file.spec
        entry = describe_embedder(
            embedder.resolve().name.removesuffix(".dove"),
            app.artifact.manifest.model_fingerprint,
            spec.prompts,
            spec.default_prompt,
        )
        request = IndexRequest(
            output=output,
            codes=codes,
            metric=metric,
            clusters=clusters,
            seed=seed,
            targets=(host_target(),),
        )
        return build_index_folder(passages, app, entry, request, progress)


def _open(embedder: Path, progress: Progress) -> Path:
    """Return the artifact of an encoder; a model directory is compiled into the cache, once."""
    from dovetail.codegen.toolchain import cache_directory
    from dovetail.compiler.encoder_spec import is_encoder
    from dovetail.compiler.pipeline import compile_model

    if (embedder / "manifest.json").exists():
        return embedder
    if not is_encoder(embedder):
        raise SpecError(f"{embedder} is neither an artifact nor the directory of a text encoder")
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(embedder.iterdir())]
    key = hashlib.sha256(repr((__version__, embedder.resolve(), files)).encode()).hexdigest()[:16]
    artifact = cache_directory() / "embedders" / f"{embedder.resolve().name}-{key}.dove"
    if not artifact.exists():
        artifact.parent.mkdir(parents=True, exist_ok=True)
        compile_model(embedder, output=artifact, effort="none", progress=progress)
    return artifact
