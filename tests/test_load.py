"""Loading a 160M artifact: quick, little memory beside its weights, pages shared by processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.compiler.pipeline import compile_model
from tests.models import save_model

SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
CHILD = """
import json, sys, time
from pathlib import Path
from dovetail.runtime.app import load

def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10

def mapped():
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith("weights.bin")
        elif inside:
            name, value = line.split(":")
            if value.endswith("kB"):
                found[name] = found.get(name, 0) + (int(value.split()[0]) << 10)
    return found

before, start = resident(), time.perf_counter()
app = load(sys.argv[1])
seconds = time.perf_counter() - start
app.generate([[1, 2, 3]], max_tokens=4, ignore_eos=True)
print(json.dumps({"seconds": seconds, "added": resident() - before}), flush=True)
sys.stdin.readline()
print(json.dumps(mapped()), flush=True)
"""


def start_child(artifact: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, str(artifact)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_line(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_load_of_a_160m_model(tmp_path: Path) -> None:
    artifact = tmp_path / "app.dove"
    save_model(tmp_path / "model", "llama", **SHAPE)
    compile_model(tmp_path / "model", output=artifact, effort="none", weight_dtype="f32")
    weights = (artifact / "models/llm/weights/weights.bin").stat().st_size
    children, loads = [], []
    for _ in range(4):
        child = start_child(artifact)
        loads.append(read_line(child))
        children.append(child)
    shared = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        shared.append(read_line(child))
    for child in children:
        child.communicate()
    assert min(load["seconds"] for load in loads) < 0.5, loads
    assert max(load["added"] for load in loads) < 1.1 * weights, (loads, weights)
    for pages in shared:
        private = pages["Private_Clean"] + pages["Private_Dirty"]
        assert private < 0.01 * weights and pages["Rss"] > 0.8 * weights, (
            pages
        )  # few rows of the embedding
