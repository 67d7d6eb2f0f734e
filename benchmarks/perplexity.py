"""Perplexity lost by quantising, ours beside llama.cpp's, and what integer activations cost.

Both sides quantise the same float copy of a model (`off_grid.py`), whose weights lie on no grid,
and score the same windows of the same text: of 512 tokens each, the second half. A side's loss is
its perplexity over that of its own float32.

`perplexity_vs_llamacpp_int4`, `_int8`: our loss / llama.cpp's, without calibration; at most 1 says
that no more is lost. `.._calibrated`: after `--calibrate` with another text. `increase_int4` and so
on: by how much each side's perplexity grows, in percent. `integer_activations_int4`, `_int8`: our
perplexity / that of the same weights with activations in float32.

    DOVETAIL_PEERS=DIR python benchmarks/perplexity.py MODEL.gguf --json F
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Report, add_report_options, add_work_option, open_report, work_folder
from dovetail.cli.bench_perplexity import cut_windows, measure_perplexity
from dovetail.compiler.pipeline import compile_model
from dovetail.loading import load
from off_grid import write_copies

CONTEXT = 512
WIDTHS = {"int4": "Q4_0", "int8": "Q8_0"}
"""Our weights -> llama.cpp's of as many bits."""
SCORED, CALIBRATING = "rag_hotpotqa_train_corpus.json", "rag_2wikimultihopqa_corpus.json.gz"
"""Passages that are scored, and others that calibrate."""
CALIBRATING_CHARACTERS = 60_000
_ESTIMATE = re.compile(r"Final estimate: PPL = ([0-9.]+) \+/- ([0-9.]+)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all sides; print and write the report."""
    options = _parse(arguments)
    config = {"model": options.model.name, "tokens": options.tokens, "context": CONTEXT}
    report = open_report("perplexity", options, config, tuple(config))
    with work_folder(options.work) as work:
        directory, file = work / "rotated", work / "rotated.gguf"
        if not file.exists():
            write_copies(options.model, work)
        texts = {name: work / f"{name}.txt" for name in ("scored", "calibrating")}
        texts["scored"].write_text(read_passages(options.traces / SCORED))
        other = read_passages(options.traces / CALIBRATING)
        texts["calibrating"].write_text(other[:CALIBRATING_CHARACTERS])
        run = Run(report, options, work, texts["scored"])
        run.llamacpp("F32", file)
        for width in WIDTHS.values():
            run.llamacpp(width, file)
        run.ours(directory, "f32", "float")
        for dtype in WIDTHS:
            run.ours(directory, dtype, "float")
            run.ours(directory, dtype, "integer")
            run.ours(directory, dtype, "integer", calibrate=texts["calibrating"])
    report.summary = summarise(report.rows)
    report.write(options.json)
    report.print()


class Run:
    """Measures one cell after the other; those that the report has are left."""

    def __init__(self, report: Report, options: argparse.Namespace, work: Path, text: Path) -> None:
        self.report, self.options, self.work, self.text = report, options, work, text
        self.windows = options.tokens // CONTEXT

    def llamacpp(self, width: str, source: Path) -> None:
        """Quantise with llama.cpp's own program and run its own measurement."""
        cell = {"side": "llama.cpp", "weights": width, "activations": "own", "calibrated": False}
        if self.has(cell):
            return
        programs = [find_program(name) for name in ("llama-quantize", "llama-perplexity")]
        if None in programs:
            print("llama.cpp is absent: no llama-quantize and llama-perplexity in DOVETAIL_PEERS")
            return
        quantize, perplexity = map(str, programs)
        file = source
        if width != "F32":
            file = self.work / f"{width}.gguf"
            run_program(quantize, str(source), str(file), width)
        limits = ("-c", str(CONTEXT), "-b", str(CONTEXT), "--chunks", str(self.windows))
        said = run_program(perplexity, "-m", str(file), "-f", str(self.text), *limits)
        found = _ESTIMATE.search(said)
        if found is None:
            raise SystemExit(f"llama-perplexity said no estimate: {said[-300:]}")
        self.add(cell, float(found[1]), float(found[2]), file.stat().st_size)

    def ours(
        self, model: Path, dtype: str, activations: str, *, calibrate: Path | None = None
    ) -> None:
        """Compile the float copy and score the windows."""
        calibrated = calibrate is not None
        cell = {"side": "dovetail", "weights": dtype, "activations": activations}
        cell["calibrated"] = calibrated
        if self.has(cell):
            return
        artifact = self.work / f"{dtype}{'-calibrated' * calibrated}.dove"
        if not artifact.exists():
            compile_model(
                model, output=artifact, effort="none", weight_dtype=dtype, calibrate=calibrate,
                max_context=CONTEXT,
            )  # fmt: skip
        size = sum(file.stat().st_size for file in artifact.rglob("weights.bin"))
        with load(artifact, activations=activations) as app:
            windows = cut_windows(app, self.text.read_text(), CONTEXT, self.windows * CONTEXT)
            found = measure_perplexity(app, windows)
        self.add(cell, found.perplexity, found.standard_error, size)

    def has(self, cell: dict[str, Any]) -> bool:
        """Tell whether an earlier run measured a cell."""
        return any(cell.items() <= row.items() for row in self.report.rows)

    def add(self, cell: dict[str, Any], perplexity: float, error: float, size: int) -> None:
        """Keep what was measured, at once."""
        found = {"perplexity": perplexity, "standard_error": error, "bytes": size}
        self.report.rows.append(cell | found)
        self.report.write(self.options.json)


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of which both sides were measured."""
    names = ("side", "weights", "activations", "calibrated")
    found = {tuple(row[name] for name in names): row for row in rows}

    def perplexity(*cell: object) -> float | None:
        return found[cell]["perplexity"] if cell in found else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below is not None else None

    ours = perplexity("dovetail", "f32", "float", False)
    theirs = perplexity("llama.cpp", "F32", "own", False)
    summary: dict[str, Any] = {}
    for dtype, width in WIDTHS.items():
        lost = ratio(perplexity("llama.cpp", width, "own", False), theirs)
        for calibrated in (False, True):
            own = ratio(perplexity("dovetail", dtype, "integer", calibrated), ours)
            name = f"perplexity_vs_llamacpp_{dtype}{'_calibrated' * calibrated}"
            summary[name] = ratio(own, lost)
            summary[f"increase_{dtype}{'_calibrated' * calibrated}"] = own and 100 * (own - 1)
        summary[f"increase_{width}"] = lost and 100 * (lost - 1)
        integer = perplexity("dovetail", dtype, "integer", False)
        floats = perplexity("dovetail", dtype, "float", False)
        summary[f"integer_activations_{dtype}"] = ratio(integer, floats)
        sizes = [
            found.get(cell, {}).get("bytes")
            for cell in (("dovetail", dtype, "integer", False), ("llama.cpp", width, "own", False))
        ]
        summary[f"bytes_vs_llamacpp_{dtype}"] = ratio(*sizes)
    return {name: value for name, value in summary.items() if value is not None}


def find_program(name: str) -> Path | None:
    """Return a program of llama.cpp in the folder DOVETAIL_PEERS, at any depth, else on PATH."""
    peers = os.environ.get("DOVETAIL_PEERS")
    files = sorted(Path(peers).rglob(name)) if peers else []
    if not files and (on_path := shutil.which(name)):
        files = [Path(on_path)]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def run_program(*command: str) -> str:
    """Return what a program printed; SystemExit with its last words where it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stderr[-600:]}")
    return done.stdout + done.stderr


def read_passages(path: Path) -> str:
    """Return the passages of a corpus, each below its title."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        corpus = json.load(file)
    if isinstance(corpus, list):
        corpus = {passage["title"]: passage["text"] for passage in corpus}
    return "\n\n".join(f"{title}\n{''.join(parts)}" for title, parts in corpus.items())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    corpus = os.environ.get("DOVETAIL_CORPUS", "../shared")
    parser.add_argument("model", type=Path, help="a GGUF file of a Llama")
    parser.add_argument("--traces", type=Path, default=Path(corpus) / "traces")
    parser.add_argument("--tokens", type=int, default=50_000, help="of the text, in all windows")
    add_report_options(parser)
    add_work_option(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
