"""What drafted tokens bring, and what they cost: tokens a second with them over without.

Two loads of a model answer the same prompts in turns. `quoting`: questions behind passages that
hold the answer, one at a time; only answers count that hold the gold span and repeat no 8 tokens in
a row. Others: open questions, drawn answers, random words and lists by a JSON Schema, 1 to 16 at
once. With `smollm2-draft` the model has the file's weights in bfloat16, and drafts come from the
file in its own 4 bits, too.

    python benchmarks/speculation.py --json benchmarks/results/speculation.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dovetail
from common import (
    Report,
    add_report_options,
    add_work_option,
    open_report,
    parse_numbers,
    speedup,
    work_folder,
)
from dovetail.tiny_world import LLAMA, corpus, prompts
from generate_models import smollm2

BARS = {"speculation_quoting_x": 1.4, "speculation_worst_x": 0.98}
LOOK_UP = {"speculative_config": {"method": "suffix"}}
MODELS: tuple[tuple[str, Path | None, dict[str, Any]], ...] = (
    ("tiny", LLAMA, {}),
    ("smollm2", smollm2(), {}),
    ("smollm2-draft", smollm2(), {"weight_dtype": "bf16"}),
)
"""What is asked, and how it is compiled; where that is not as the file is, the file drafts."""
WORKS = ("quoting", "open", "drawn", "words", "schema")
NGRAM = 8
OPEN = (
    *("What is a good name for a small grey cat?", "Why is the sky blue?"),
    *("Give me three ideas for a birthday party.", "How do I boil an egg?"),
    *("Write a short story about a lighthouse.", "What is the difference of rain and snow?"),
    *("Explain how a bicycle stays upright.", "What should I cook with rice and beans?"),
)
PEOPLE = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 20},
            "profession": {"enum": ["teacher", "engineer", "doctor", "farmer"]},
            "year_of_birth": {"type": "integer"},
            "email_address": {"type": "string", "maxLength": 30},
        },
        "required": ["first_name", "profession", "year_of_birth", "email_address"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, `batch` of them at a time, and the gold spans that answers should hold."""

    name: str
    batch: int
    prompts: Sequence[Any]
    options: dict[str, Any] = field(default_factory=dict)
    gold: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds for `tokens` after the first ones, and what a batch said."""

    seconds: float
    tokens: int
    said: tuple[Any, ...]


def repeats(tokens: Sequence[int], length: int = NGRAM) -> bool:
    """Tell whether `length` tokens in a row stand twice in an answer."""
    parts = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(parts)) < len(parts)


def ask(app: Any, work: Work, at: int) -> Answer:
    """Have a batch answered."""
    done = app.generate(list(work.prompts[at : at + work.batch]), **work.options)
    begun = min(one.metrics.first_token for one in done)
    ended = max(one.metrics.last_token for one in done)
    return Answer(ended - begun, sum(len(one.token_ids) - 1 for one in done), tuple(done))


def counts(work: Work, at: int, answer: Answer) -> bool:
    """Tell whether an answer is one that is compared."""
    if not work.gold:
        return answer.tokens > 0
    (one,) = answer.said
    return answer.tokens > 3 and work.gold[at] in one.text and not repeats(one.token_ids)


def compare(apps: Sequence[Any], work: Work, rounds: int) -> dict[str, Any]:
    """Return a row: how many times the tokens a second there are with drafts, in rounds."""
    before, times, same, kept = drafted(apps[1]), ([], []), list[bool](), list[int]()
    starts = range(0, len(work.prompts), work.batch)
    for turn in range(-1, rounds):  # the first one warms up, and says what counts
        totals = [[0.0, 0], [0.0, 0]]
        for place, at in enumerate(starts):
            if turn >= 0 and at not in kept:
                continue
            order = (0, 1) if (place + turn) % 2 else (1, 0)
            found = dict(sorted((side, ask(apps[side], work, at)) for side in order))
            if turn < 0:
                kept += [at] if counts(work, at, found[0]) else []
            pairs = zip(found[0].said, found[1].said, strict=True)
            same += [one.token_ids == other.token_ids for one, other in pairs]
            for side, answer in found.items():
                totals[side][0] += answer.seconds
                totals[side][1] += answer.tokens
        if turn >= 0:
            for side, (seconds, tokens) in enumerate(totals):
                times[side].append(seconds / max(1, tokens))
    spent = {name: count - before[name] for name, count in drafted(apps[1]).items()}
    return {
        "work": work.name,
        "batch": work.batch,
        "answers": len(kept) * work.batch,
        "same": sum(same) / len(same),
        "plain_tok_s": 1 / sorted(times[0])[rounds // 2] if kept else None,
        "accepted": spent["accepted_tokens"] / max(1, spent["draft_tokens"]),
        **(speedup(times[1], times[0]) if kept else {"ratio": None, "bound": None}),
    }


def drafted(app: Any) -> dict[str, int]:
    """Return what was drafted so far, and accepted."""
    found = app.engine.scheduler.speculation.counts
    return {name: found[name] for name in ("draft_tokens", "accepted_tokens")}


def chat(app: Any, text: str) -> list[int]:
    """Return a question as the model's template has it."""
    return list(app.chat_prompts.fit([{"role": "user", "content": text}], 256).ids)


def quoting_smollm2(app: Any, traces: Path, count: int) -> Work:
    """Return questions of HotpotQA behind their supporting passages."""
    questions = json.loads((traces / "rag_hotpotqa_train.json").read_text())
    passages = json.loads((traces / "rag_hotpotqa_train_corpus.json").read_text())
    found = [one for one in questions if one["answer"] not in ("yes", "no")][:count]
    asked = []
    for one in found:
        titles = dict.fromkeys(title for title, _ in one["supporting_facts"])
        texts = "\n".join(f"{title}: {' '.join(passages[title])}" for title in titles)
        wanted = f"Quote the sentences of the text that answer: {one['question']}"
        asked.append(chat(app, f"{texts}\n\n{wanted}"))
    return Work("quoting", 1, asked, {"max_tokens": 96}, [one["answer"] for one in found])


def quoting_tiny(count: int) -> Work:
    """Return questions of the tiny world behind their passages; sentences of these are wanted."""
    texts = {passage.id: passage.document for passage in corpus.passages()}
    questions = [one for one in corpus.questions("test") if one.gold][:count]
    asked = [
        prompts.COMPRESS.format(
            docs=prompts.bullets(texts[i] for i in one.gold), question=one.question
        )
        for one in questions
    ]
    options = {"max_tokens": prompts.MAX_TOKENS}
    return Work("quoting", 1, asked, options, [one.answer for one in questions])


def other_works(
    ask_one: Callable[[str], Any], vocabulary: int, options: argparse.Namespace
) -> Iterator[Work]:
    """Yield works whose answers quote nothing, or hardly anything."""
    rng = random.Random(26)
    for batch in options.batches:
        asked = [ask_one(OPEN[i % len(OPEN)]) for i in range(max(options.prompts, batch))]
        words = [[rng.randrange(3, vocabulary) for _ in range(100)] for _ in asked]
        plain = {"max_tokens": 64, "ignore_eos": True}
        yield Work("open", batch, asked, {"max_tokens": 64})
        yield Work("drawn", batch, asked, {**plain, "temperature": 1.0, "seed": 7})
        yield Work("words", batch, words, {**plain, "temperature": 1.0, "seed": 7})
        yield Work("schema", batch, asked, {"max_tokens": 256, "schema": PEOPLE})


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    options = _parse(arguments)
    config = {"rounds": options.rounds, "questions": options.questions}
    report = open_report("speculation", options, config, ("rounds", "questions"))
    with work_folder(options.work) as folder:
        for name, source, compiled in MODELS:
            if source is None or name not in options.models:
                continue
            path = make(folder, name, source, compiled)
            drafting = {"draft": str(make(folder, "smollm2", source, {}))} if compiled else LOOK_UP
            with ExitStack() as opened:
                apps = [
                    opened.enter_context(dovetail.load(path, **given)) for given in ({}, drafting)
                ]
                for work in works(name, apps[0], options):
                    if work.name not in options.works:
                        continue
                    row = compare(apps, work, options.rounds)
                    report.rows.append({"model": name, **row})
                    print(report.rows[-1], flush=True)
    report.summary = summarise(report.rows)
    report.write(options.json)
    report.print()
    for key, bar in BARS.items():
        value = report.summary[key]
        print(f"{key}: {'met' if value is not None and value >= bar else 'missed'} ({bar})")
    return report


def make(folder: Path, name: str, source: Path, options: dict[str, Any]) -> Path:
    """Return a model's artifact, which is compiled by rules where there is none."""
    path = folder / f"{name}.dove"
    if not path.exists():
        dovetail.compile(source, output=path, effort="none", **options)
    return path


def works(name: str, app: Any, options: argparse.Namespace) -> Iterator[Work]:
    """Yield what a model is asked."""
    vocabulary = app.engine.spec.vocab_size
    if name == "tiny":
        yield quoting_tiny(options.questions)
        yield from other_works(lambda text: f"Question: {text}\nPassage:", vocabulary, options)
    else:
        yield quoting_smollm2(app, options.traces, options.questions)
        yield from other_works(lambda text: chat(app, text), vocabulary, options)


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the least ratio where answers quote, and the least lower bound elsewhere."""
    quoting = [row["ratio"] for row in rows if row["work"] == "quoting"]
    others = [row["bound"] for row in rows if row["work"] != "quoting"]
    return {
        "speculation_quoting_x": None if None in quoting else min(quoting, default=None),
        "speculation_worst_x": None if None in others else min(others, default=None),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    corpus_folder = os.environ.get("DOVETAIL_CORPUS", "../shared")
    parser.add_argument("--traces", type=Path, default=Path(corpus_folder) / "traces")
    parser.add_argument("--models", nargs="+", default=[name for name, *_ in MODELS])
    parser.add_argument("--questions", type=int, default=16, help="that passages answer")
    parser.add_argument("--batches", type=parse_numbers, default=(1, 4, 16))
    parser.add_argument("--works", nargs="+", default=WORKS, choices=WORKS)
    parser.add_argument("--prompts", type=int, default=8, help="of each work beside quoting")
    parser.add_argument("--rounds", type=int, default=9)
    add_report_options(parser)
    add_work_option(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
