from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dovetail.tiny_world import corpus
from dovetail.tiny_world.questions import short_answer

HASH = "451b7925ae1acd273bb713aefe28e27a1f76ca11a28246fa27477365bfada069"


def test_the_bundled_world_is_this_one(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for path in sorted(corpus.write(tmp_path)):
        digest.update(path.read_bytes())
    assert digest.hexdigest() == HASH
    assert 4500 <= len(corpus.passages()) <= 5500


def test_files_are_json_lines_and_splits_are_disjoint(tmp_path: Path) -> None:
    paths = {path.name: path for path in corpus.write(tmp_path / "world")}
    rows = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, path in paths.items()
    }
    assert set(rows) == {"corpus.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl"}
    texts = {row["id"]: row["text"] for row in rows["corpus.jsonl"]}
    gold = {}
    for split in corpus.COUNTS:
        questions = rows[f"{split}.jsonl"]
        assert len(questions) == sum(corpus.COUNTS[split].values())
        assert all(short_answer(q["statement"]).lower() == q["answer"].lower() for q in questions)
        gold[split] = {passage for q in questions for passage in q["gold"]}
        assert gold[split] <= set(texts)
    assert not gold["train"] & gold["dev"] and not gold["dev"] & gold["test"]
    assert not gold["train"] & gold["test"]
