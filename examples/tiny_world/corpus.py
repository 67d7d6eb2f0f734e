"""The bundled world's passages and questions, and the script that writes them as JSON lines.

Run: python examples/tiny_world/corpus.py --out FOLDER. In: the seed. Out: corpus.jsonl with every
passage, and train.jsonl, dev.jsonl, test.jsonl with questions; splits share no entity.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dovetail.tiny_world import SEED, SHARES
from dovetail.tiny_world.questions import (
    COMPARISON,
    SINGLE,
    TWO_HOP,
    UNANSWERABLE,
    Question,
    make_questions,
)
from dovetail.tiny_world.world import Passage, World, build_world

COUNTS = {
    "train": {SINGLE: 1200, TWO_HOP: 600, COMPARISON: 300, UNANSWERABLE: 400},
    "dev": {SINGLE: 120, TWO_HOP: 60, COMPARISON: 30, UNANSWERABLE: 40},
    "test": {SINGLE: 300, TWO_HOP: 150, COMPARISON: 75, UNANSWERABLE: 100},
}


@functools.cache
def bundled_world() -> World:
    """Return the world of SEED."""
    return build_world(SEED, shares=SHARES)


def passages() -> tuple[Passage, ...]:
    """Return all passages of the bundled world, in the order of their ids."""
    return tuple(bundled_world().passages)


@functools.cache
def questions(split: str) -> tuple[Question, ...]:
    """Return the questions of `split`: train, dev or test."""
    return tuple(make_questions(SEED, bundled_world(), split, COUNTS[split]))


def write(folder: Path) -> tuple[Path, ...]:
    """Write the JSON lines files into `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, lines in _files().items():
        paths.append(folder / name)
        paths[-1].write_text("".join(lines))
    return tuple(paths)


def _files() -> dict[str, Iterator[str]]:
    corpus = ({"id": p.id, "title": p.title, "text": p.text} for p in passages())
    files = {"corpus.jsonl": _lines(corpus)}
    for split in COUNTS:
        files[f"{split}.jsonl"] = _lines(_question_object(q) for q in questions(split))
    return files


def _lines(objects: Iterable[Mapping[str, object]]) -> Iterator[str]:
    return (json.dumps(value) + "\n" for value in objects)


def _question_object(question: Question) -> dict[str, object]:
    """Return the question as a JSON object; a step is a question and the sentence that answers."""
    steps = [{"question": s.question, "statement": s.statement} for s in question.steps]
    rest = ("id", "kind", "split", "question", "answer", "statement", "gold")
    return {name: getattr(question, name) for name in rest} | {"steps": steps}


def main() -> None:
    """Write the world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/tiny_world"))
    for path in write(parser.parse_args().out):
        print(path)


if __name__ == "__main__":
    main()
