"""Where the topology files and traces of real machines lie, and what is true of each file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repository import ROOT

CORPUS = ROOT / Path(os.environ.get("DOVETAIL_CORPUS", "../shared"))
TOPOLOGIES = CORPUS / "topologies"


@dataclass(frozen=True)
class Truth:
    """The counts that `index.md` gives for one file."""

    file: str
    sockets: int
    numa_nodes: int
    memory_only_nodes: int
    l3_groups: int
    cores: int
    pus: int
    allowed_pus: int


def truths() -> list[Truth]:
    """Return one entry per file of the corpus; empty where there is no corpus."""
    index = TOPOLOGIES / "index.md"
    if not index.is_file():
        return []
    rows = [line.strip("|").split("|") for line in index.read_text().splitlines()]
    return [_truth(row) for row in rows if len(row) > 8 and row[1].strip() == "shared"]


def _truth(row: list[str]) -> Truth:
    file, _, _, *counts = (cell.strip() for cell in row[:8])
    sockets, nodes, caches, cores, pus = (int(re.match(r"\d+", cell)[0]) for cell in counts)
    memory_only = re.search(r"\((\d+) mem-only\)", counts[1])
    allowed = re.search(r"\((\d+) allowed\)", counts[4])
    return Truth(
        file,
        sockets,
        nodes,
        int(memory_only[1]) if memory_only else 0,
        caches,
        cores,
        pus,
        int(allowed[1]) if allowed else pus,
    )


def corpus_file(name: str) -> Path:
    """Return a file of the corpus; skips the test where it is absent."""
    path = CORPUS / name
    if not path.exists():
        pytest.skip(f"no {name} under {CORPUS}; set DOVETAIL_CORPUS")
    return path
