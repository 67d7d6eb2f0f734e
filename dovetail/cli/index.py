"""`dovetail index build`: a corpus and an encoder to an index folder, with a bar and an ETA.

In: JSON lines, JSON, Markdown or text, and a model directory or artifact that embeds. Out: a folder
that `dovetail.runtime.retrieval.folder.open_index` opens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.options import AsJson, Threads, Trust
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
    from dovetail.compiler.index_build import IndexReport
    from dovetail.ir.index_file import EmbedderEntry
    from dovetail.runtime.app import App


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
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Build an index of a corpus; run again after an interruption, it goes on where it was."""
    try:
        report = _build(
            corpus, output, embedder, codes, metric, clusters, words, seed, threads, trust
        )
    except (KeyboardInterrupt, Terminated):
        fail("interrupted; run the same command again to go on with the passages left")
    if json:
        print_json(report)
    else:
        print(describe_index(report))


def describe_index(report: IndexReport) -> str:
    """Return the lines a person reads after a build."""
    kind = "searched whole" if report.clusters == 1 else f"{report.clusters} clusters"
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
    trust: bool,
) -> IndexReport:
    from dovetail.cli.model_cache import find_artifact
    from dovetail.codegen.targets import host_target
    from dovetail.compiler.corpus import read_corpus
    from dovetail.loading import load
    from dovetail.runtime.retrieval.manifest import need_faiss

    need_faiss()
    from dovetail.compiler.index_build import IndexRequest, build_index_folder

    passages = read_corpus(corpus, words)
    if not (embedder / "manifest.json").is_file():
        _check_family(embedder)
    artifact = find_artifact(embedder, {})
    with progress_bars() as progress, load(artifact, threads=threads, trust=trust) as app:
        entry = describe_encoder(app, embedder)
        request = IndexRequest(
            output=output,
            codes=codes,
            metric=metric,
            clusters=clusters,
            seed=seed,
            target=host_target(),
        )
        return build_index_folder(passages, app, entry, request, progress)


def _check_family(model: Path) -> None:
    """Raise SpecError for a model that is no supported encoder, before it is compiled."""
    from dovetail.compiler.config import Config
    from dovetail.compiler.encoder_families import find_family
    from dovetail.compiler.encoder_spec import open_folder

    file = open_folder(model).transformer / "config.json"
    if file.is_file():
        find_family(Config.read(file))


def describe_encoder(app: App, path: Path) -> EmbedderEntry:
    """Return what an index keeps of the app that embeds its passages, given as `path`."""
    from dovetail.compiler.index_build import describe_embedder

    if not app.artifact.encoders:
        raise SpecError(f"{path} has no encoder; give a model that embeds texts")
    spec = next(iter(app.artifact.encoders.values())).file.spec
    name, mark = path.resolve().name.removesuffix(".dove"), app.artifact.manifest.model_fingerprint
    return describe_embedder(name, mark, spec.prompts, spec.default_prompt)
