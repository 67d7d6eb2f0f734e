"""`dovetail index build`: a corpus and an encoder to an index folder, with a bar and an ETA.

In: JSON lines, JSON, CSV, Markdown or text, and a model directory or artifact that embeds. Out: a
folder that `dovetail.runtime.retrieval.folder.open_index` opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.options import AsJson, Threads, Trust
from dovetail.cli.report import Terminated, fail, progress_bars, show_bytes, show_report, tell
from dovetail.errors import SpecError

if TYPE_CHECKING:
    from dovetail.compiler.write.index_build import IndexReport
    from dovetail.ir.index_file import EmbedderEntry, Passage
    from dovetail.runtime.app import App

SAMPLED, STRANGE = 256, 0.05
"""Passages that are looked at, and the part of their words unknown from which searches are poor."""


def index_build_command(
    corpus: Annotated[
        Path,
        typer.Argument(help="A file (*.jsonl, *.json, *.csv, *.md, *.txt, also .gz), or a folder."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The index folder to write.")],
    embedder: Annotated[str, "A model directory of an encoder, a hub id, or its artifact."],
    codes: Annotated[
        str, "How vectors are stored: flat (exact), sq8 (1/4 the size) or pq (1/16)."
    ] = "flat",
    metric: Annotated[
        str | None, "l2 or ip (inner product); default: ip if vectors have length 1, else l2."
    ] = None,
    clusters: Annotated[
        int | None, "Number of clusters, 1 = exact search; default: by the number of passages."
    ] = None,
    words: Annotated[
        int, typer.Option(min=1, help="Longest passage of Markdown or text, in words.")
    ] = 200,
    seed: Annotated[int, "Random seed of the clustering."] = 0,
    threads: Threads = None,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Build a search index of a corpus. Run it again to continue, or to take in what is new."""
    from dovetail.cli.model_cache import find_artifact
    from dovetail.codegen.targets import host_target
    from dovetail.compiler.models.hub import find_model
    from dovetail.compiler.write.corpus import read_corpus
    from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
    from dovetail.compiler.write.writer import check_output
    from dovetail.ir.index_file import IndexManifest
    from dovetail.loading import load

    check_output(output, kind=IndexManifest)
    try:
        passages = read_corpus(corpus, words)
        tell_unread(corpus)
        found = find_model(embedder)
        if not (found / "manifest.json").is_file():
            _check_family(found)
        artifact = find_artifact(found, {})
        with progress_bars() as progress, load(artifact, threads=threads, trust=trust) as app:
            entry = describe_encoder(app, embedder)
            warn_of_unknown(app, passages)
            request = IndexRequest(
                output=output,
                codes=codes,
                metric=metric,
                clusters=clusters,
                seed=seed,
                target=host_target(),
                cut=app.embeddings.choose(labels=False).divide,
            )
            report = build_index_folder(passages, app, entry, request, progress)
    except (KeyboardInterrupt, Terminated):
        fail("interrupted; run the same command again to continue")
    show_report(report, describe_index, json=json)


def describe_index(report: IndexReport) -> str:
    """Return the lines a person reads after a build."""
    kind = "searched whole" if report.clusters == 1 else f"{report.clusters} clusters"
    before = {"by an interrupted build before": report.resumed, "as they were": report.kept}
    told = ", ".join(f"{count} {how}" for how, count in before.items() if count)
    again = f" ({told})" if told else ""
    long = (
        f"\n{report.divided} passages are longer than {report.embedder} reads at once: each was "
        "cut into parts that are found one by one, under its key"
    )
    return (
        f"{report.path}: {report.documents} passages{again}, {report.dim} values each by "
        f"{report.embedder}; {kind}, {report.codes}, {report.metric}, {show_bytes(report.bytes)}"
        f"{long if report.divided else ''}"
    )


def tell_unread(corpus: Path) -> None:
    """Say so where files of a folder are no corpus, such as PDF."""
    from dovetail.compiler.write.corpus import READERS, unread_kinds

    if kinds := unread_kinds(corpus):
        named = ", ".join(kind for kind, _ in kinds.most_common(5))
        tell(
            f"{kinds.total()} files are left out ({named}): only {', '.join(READERS)} are read; "
            "convert others to Markdown or text"
        )


def warn_of_unknown(app: App, passages: Sequence[Passage]) -> None:
    """Say so where the encoder of an app has no word for many of those in some passages."""
    if not app.artifact.encoders:
        return
    part = app.embeddings.choose(labels=False).unknown([p.text for p in passages[:SAMPLED]])
    if part > STRANGE:
        tell(
            f"this encoder has no word for {part:.0%} of the corpus, so searches will find little "
            "there: the bundled one knows only its tiny world; give an encoder for such texts, "
            "such as sentence-transformers/all-MiniLM-L6-v2"
        )


def _check_family(model: Path) -> None:
    """Raise SpecError for a model that is no supported encoder, before it is compiled."""
    from dovetail.compiler.families.encoders import find_family
    from dovetail.compiler.models.encoder_folder import is_encoder, open_folder

    config = open_folder(model).config()
    if config.has("architectures") and not is_encoder(model):
        find_family(config)


def describe_encoder(app: App, given: str | Path) -> EmbedderEntry:
    """Return what an index keeps of the app that embeds its passages, the model `given`."""
    from dovetail.compiler.models.hub import name_model
    from dovetail.compiler.write.index_build import describe_embedder

    if not app.artifact.encoders:
        raise SpecError(f"{given} has no encoder; give a model that embeds texts")
    spec = next(iter(app.artifact.encoders.values())).file.spec
    mark = app.artifact.manifest.model_fingerprint
    return describe_embedder(name_model(given), mark, spec.prompts, spec.default_prompt)
