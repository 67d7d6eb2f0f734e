"""How many tokens of prompts are read again, by the order in which prompts show their documents.

Counted, not timed: the prompts of one-shot over the passages and questions of `rag_parts.py`, one
after the other, into a KV cache that forgets nothing. The orders:

    nearest    that of the search
    arranged   what `order="any"` makes of it, knowing the prompts before
    foreseen   the same, and among documents that nobody began with those first that most of the
               questions to come will show: what holding all questions back could gain

Then, with room for a part of the blocks alone, by what is forgotten first (`kept`): the part of
tokens read again from our pool (`pool`) and from RAGCache's knowledge tree (`tree`).

`restart` is timed: one-shot runs of AT_ONCE questions by Zipf's law, all at once, the states after
each other and the seeds in turns:

    cold        nothing was read before
    warm        the same questions again: the pool has their KV
    restarted   the app was closed and loaded again, without a file
    file        the same with the `kv_file` of the first two

    python benchmarks/rag_reuse.py --work DIR --json FILE [--only restart [--tiny]]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from baselines.knowledge_tree import KnowledgeTree
from common import (
    Report,
    add_report_options,
    add_work_option,
    keep_current,
    open_report,
    timed_region,
    work_folder,
)
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.index_file import VECTORS
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.workflow import Generation, Workflow
from dovetail.runtime.app import load
from dovetail.runtime.flows.control.prefixes import Opening, Prefixes
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import choose_probes
from dovetail.runtime.index.documents import Document
from dovetail.runtime.retrieval.folder import open_index
from dovetail.runtime.schedule.kv_pool import KvPool, hash_blocks
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from dovetail.workflows import one_shot
from hotpot import embed_texts
from rag_columns import KV_FILE_BYTES, TOKENS
from rag_parts import (
    BF16,
    DIFFERENT,
    TOPK,
    ZIPF,
    Parts,
    build_index,
    build_parts,
    pick_questions,
)

COUNTS = (48, 500)
ROOMS = (0.1, 0.25, 0.5)
"""Parts of all blocks of the prompts that are kept."""
SEEDS = 3
ORDERS = ("nearest", "arranged", "foreseen")
AT_ONCE = 48
"""Questions of a part of `restart`."""
SESSIONS = ((("cold", "warm"), True), (("restarted",), False), (("file",), True))
"""Of an app: its states, one after the other, and whether it has the file."""
MEASURES = ("orders", "restart")
Tokenize: TypeAlias = Callable[[str], Sequence[int]]


def find_documents(parts: Parts, app: Any) -> dict[str, list[Document]]:
    """Return the documents of all questions, nearest first."""
    import faiss

    index, store = faiss.read_index(str(parts.index / VECTORS)), open_index(parts.index).store
    index.nprobe = choose_probes(index.nlist)
    scores, rows = index.search(embed_texts(app, parts.questions), TOPK)
    found = [zip((-scores).tolist(), rows.tolist(), strict=True)]
    hits = [list(zip(s, r, strict=True)) for s, r in found[0]]
    return {q: store.documents(h, "ip") for q, h in zip(parts.questions, hits, strict=True)}


def write_prompts(
    openings: Sequence[Opening], order: str, tokenize: Tokenize
) -> Iterator[Sequence[int]]:
    """Yield the tokens of prompts in an order."""
    prefixes = Prefixes()
    to_come = Counter(id_ for opening in openings for id_ in opening.ids)
    for given in openings:
        to_come.subtract(given.ids)
        opening = given
        if order == "foreseen":  # of equals those stay first that were
            opening = opening.arrange(sorted(opening.ids, key=lambda id_: -to_come[id_]))
        if order != "nearest":
            opening = prefixes.arrange(opening)
        prefixes.keep(opening)
        yield tokenize(opening.prompt())


def count_tokens(openings: Sequence[Opening], order: str, tokenize: Tokenize) -> tuple[int, int]:
    """Return the tokens of prompts in an order, and those of them that must be computed."""
    known, every, computed = set[bytes](), 0, 0
    for tokens in write_prompts(openings, order, tokenize):
        hashes = hash_blocks(tokens)
        shared = next((n for n, each in enumerate(hashes) if each not in known), len(hashes))
        known.update(hashes)
        every += len(tokens)
        computed += len(tokens) - shared * KV_BLOCK
    return every, computed


def read_again(prompts: Sequence[Sequence[int]], room: float) -> dict[str, float]:
    """Return the parts of tokens that need not be computed where a part of the blocks is kept."""
    hashed = [hash_blocks(tokens) for tokens in prompts]
    most = max(len(tokens) for tokens in prompts) // KV_BLOCK + 1
    blocks = max(most, round(room * len({each for hashes in hashed for each in hashes})))
    pool, tree = KvPool(blocks + 1, keep=True), KnowledgeTree(blocks)  # 1: the end, never shared
    shared = {"pool": 0, "tree": 0}
    for number, (tokens, hashes) in enumerate(zip(prompts, hashed, strict=True)):
        shared["pool"] += pool.open(number, hashes)
        pool.grow(number, len(tokens))
        pool.publish(number, tokens, len(tokens))
        pool.close(number)
        shared["tree"] += tree.take(hashes) * KV_BLOCK
    every = sum(map(len, prompts))
    return {name: tokens / every for name, tokens in shared.items()}


def measure_reuse(parts: Parts) -> list[dict[str, Any]]:
    """Return a row for each set of questions: parts of tokens read again, and the gain by these."""
    node = next(
        n for n in one_shot(chat=False).workflow().nodes.values() if isinstance(n, Generation)
    )
    with load(parts.apps[BF16]) as app:
        assert app.tokenizer is not None, "the model has one"
        found, tokenize = find_documents(parts, app), app.tokenizer.encode
    openings = {
        question: Opening.of(Call(node, 0, {"docs": docs, "input": question}, {}), ("docs",))
        for question, docs in found.items()
    }
    rows = []
    for kind in (ZIPF, DIFFERENT):
        for count in COUNTS:
            runs: dict[str, list[tuple[int, int]]] = {order: [] for order in ORDERS}
            for seed in range(SEEDS):
                asked = pick_questions(parts.questions, kind, count, seed)
                chosen = [opening for q in asked if (opening := openings[q]) is not None]
                for order in ORDERS:
                    runs[order].append(count_tokens(chosen, order, tokenize))
            row: dict[str, Any] = {"questions": kind, "count": count}
            for order, counted in runs.items():
                row[order] = statistics.fmean(1 - computed / every for every, computed in counted)
            for order in ORDERS[1:]:
                pairs = zip(runs["nearest"], runs[order], strict=True)
                row[f"{order}_gain"] = statistics.fmean(one[1] / other[1] for one, other in pairs)
            rows.append(row)
        for room in ROOMS:
            found_again = []
            for seed in range(SEEDS):
                asked = pick_questions(parts.questions, kind, COUNTS[-1], seed)
                chosen = [opening for q in asked if (opening := openings[q]) is not None]
                prompts = list(write_prompts(chosen, "nearest", tokenize))
                found_again.append(read_again(prompts, room))
            means = {n: statistics.fmean(one[n] for one in found_again) for n in found_again[0]}
            rows.append({"questions": kind, "count": COUNTS[-1], "kept": room, **means})
    return rows


def build_tiny(folder: Path) -> Parts:
    """Compile the tiny world's Llama and encoder and index its passages, unless they are there."""
    parts = Parts(
        folder=folder,
        encoder=folder / "encoder.dove",
        index=folder / "idx",
        apps={BF16: folder / "app.dove"},
        questions=tuple(question.question for question in corpus.questions("dev")),
    )
    models: dict[Path, Any] = {parts.encoder: ENCODER}
    models[parts.apps[BF16]] = {"llm": LLAMA, "embedder": ENCODER}
    for path, model in models.items():
        keep_current(path, lambda m=model, p=path: compile_model(m, output=p, effort="none"))
    if not parts.index.exists():
        with load(parts.encoder) as encoder:
            build_index(parts.index, [each.document for each in corpus.passages()], encoder)
    return parts


def measure_restart(parts: Parts, count: int, seeds: int) -> list[dict[str, Any]]:
    """Return a row for each state and seed: the rate, and tokens of prompts that were computed."""
    workflow = one_shot(topk=TOPK, chat=False, max_tokens=TOKENS, ignore_eos=True).workflow()
    rows = []
    for seed in range(seeds):
        questions = pick_questions(parts.questions, ZIPF, count, seed)
        with tempfile.TemporaryDirectory() as folder:
            file = {"kv_file": str(Path(folder) / "kv"), "kv_file_bytes": KV_FILE_BYTES}
            for states, kept in SESSIONS:
                with load(parts.apps[BF16], apart=True, **(file if kept else {})) as app:
                    app.add_index(parts.index)
                    app.run(workflow, {"input": "?"})  # the first run measures what steps cost
                    for state in states:
                        figures = ask_all(app, workflow, questions)
                        rows.append({"part": "restart", "state": state, "seed": seed, **figures})
                        print(rows[-1], flush=True)
    return rows


def ask_all(app: Any, workflow: Workflow, questions: Sequence[str]) -> dict[str, float]:
    """Return what it takes to answer all questions at once."""
    before = app.generator.host.load.tokens["prefill"]
    with timed_region() as region:
        jobs = [app.submit_workflow(workflow, {"input": question}) for question in questions]
        for job in jobs:
            job.result()
    computed = app.generator.host.load.tokens["prefill"] - before
    rate = len(questions) / region.seconds
    return {"rate": rate, "computed": computed, "others": region.others}


def summarize_restart(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how many times as fast as without a file: the pool, and the file after a restart."""
    rates = {
        state: statistics.median(row["rate"] for row in rows if row.get("state") == state)
        for state in ("warm", "restarted", "file")
    }
    return {f"{state}_x": rates[state] / rates["restarted"] for state in ("warm", "file")}


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    corpus = Path(os.environ.get("DOVETAIL_CORPUS", "../shared"))
    parser.add_argument("--traces", type=Path, default=corpus / "traces")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--tiny", action="store_true", help="restart with the tiny world")
    parser.add_argument("--count", type=int, default=AT_ONCE, help="questions of restart")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of restart")
    add_work_option(parser)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    report = open_report("rag_reuse", options, {"topk": TOPK, "seeds": SEEDS}, ())
    with work_folder(options.work) as folder:
        parts = build_tiny(folder) if options.tiny else build_parts(folder, options.traces)
        if "orders" in options.only:
            report.rows += measure_reuse(parts)
            report.summary |= {
                f"arranged_{kind}_max": max(
                    r["arranged_gain"]
                    for r in report.rows
                    if r["questions"] == kind and "arranged_gain" in r
                )
                for kind in (ZIPF, DIFFERENT)
            }
        if "restart" in options.only:
            found = measure_restart(parts, options.count, options.seeds)
            report.rows += found
            report.summary |= summarize_restart(found)
    report.write(options.json)
    report.print()
    return report


if __name__ == "__main__":
    main()
