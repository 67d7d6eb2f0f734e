"""Opens what an app runs: the engine of its model, here or in a process, and its encoders.

In: an opened artifact and settled options. Out: a `Generator` and `Embeddings`; all, or none.
"""

from __future__ import annotations

from contextlib import ExitStack

from dovetail.runtime.artifact import Artifact
from dovetail.runtime.embed.open import open_encoders
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.embed.texts import Embeddings
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting.generator import Generator
from dovetail.runtime.hosting.loop import EngineLoop
from dovetail.runtime.hosting.open_engine import open_engine
from dovetail.runtime.hosting.process import EngineProcess
from dovetail.runtime.machine.seat import Board
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.topology.hardware import HardwareSpec


def open_parts(
    artifact: Artifact,
    hardware: HardwareSpec,
    options: EngineOptions,
    board: Board | None,
    embedding: EmbeddingSettings | None,
    *,
    device: str,
    apart: bool,
) -> tuple[Generator | None, Embeddings]:
    """Return what generates, if the artifact has a model that does, and what embeds.

    device: of encoders, which run on all that `auto` finds. Raises as `load`.
    """
    with ExitStack() as opened:
        process = None
        if apart and artifact.models:  # it opens while the encoders do
            process = EngineProcess(artifact.path, options, board)
            opened.callback(process.close)
        embeddings = open_encoders(
            artifact,
            hardware,
            plan=options.plan,
            threads=options.threads,
            settings=embedding,
            apart=apart,
            device=device,
            board=board,
        )
        opened.callback(embeddings.close)
        generator = None
        if artifact.models:
            if process is not None:
                process.wait()
            host = process or EngineLoop(open_engine(artifact, hardware, options, board))
            generator = _make_generator(artifact, options, host)
        opened.pop_all()
    return generator, embeddings


def _make_generator(
    artifact: Artifact, options: EngineOptions, host: EngineLoop | EngineProcess
) -> Generator:
    part = next(iter(artifact.models.values()))
    tokenizer = Tokenizer(part.tokenizer) if part.tokenizer else None
    context = options.bound_context(part.file.spec.max_context)
    return Generator(host, tokenizer, artifact.path, context, part.folder)
