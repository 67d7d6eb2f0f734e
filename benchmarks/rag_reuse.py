"""How many tokens of prompts are read again, by the order in which prompts show their documents.

Counted, not timed: the prompts of one-shot over the passages and questions of `rag_parts.py`, one
after the other, into a KV cache that forgets nothing. The orders:

    nearest    that of the search
    arranged   what `order="any"` makes of it, knowing the prompts before
    foreseen   the same, and among documents that nobody began with those first that most of the
               questions to come will show: what holding all questions back could gain

Then, with room for a part of the blocks alone, by what is forgotten first (`kept`): the part of
tokens read again from our pool (`pool`) and from RAGCache's knowledge tree (`tree`).

    python benchmarks/rag_reuse.py --work DIR --json FILE
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from baselines.knowledge_tree import KnowledgeTree
from common import Report, add_report_options, add_work_option, open_report, work_folder
from dovetail.ir.index_file import VECTORS
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.workflow import Generation
from dovetail.runtime.app import load
from dovetail.runtime.flows.control.prefixes import Opening, Prefixes
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import choose_probes
from dovetail.runtime.index.documents import Document
from dovetail.runtime.retrieval.folder import open_index
from dovetail.runtime.schedule.kv_pool import KvPool, hash_blocks
from dovetail.workflows import one_shot
from hotpot import embed_texts
from rag_parts import BF16, DIFFERENT, TOPK, ZIPF, Parts, build_parts, pick_questions

COUNTS = (48, 500)
ROOMS = (0.1, 0.25, 0.5)
"""Parts of all blocks of the prompts that are kept."""
SEEDS = 3
ORDERS = ("nearest", "arranged", "foreseen")
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
    node = next(n for n in one_shot().workflow().nodes.values() if isinstance(n, Generation))
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


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    corpus = Path(os.environ.get("DOVETAIL_CORPUS", "../shared"))
    parser.add_argument("--traces", type=Path, default=corpus / "traces")
    add_work_option(parser)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    report = open_report("rag_reuse", options, {"topk": TOPK, "seeds": SEEDS}, ())
    with work_folder(options.work) as folder:
        report.rows = measure_reuse(build_parts(folder, options.traces))
    report.summary = {
        f"arranged_{kind}_max": max(
            r["arranged_gain"]
            for r in report.rows
            if r["questions"] == kind and "arranged_gain" in r
        )
        for kind in (ZIPF, DIFFERENT)
    }
    report.write(options.json)
    report.print()
    return report


if __name__ == "__main__":
    main()
