"""`import dovetail` is quick and loads only the face; the command line is as sparing."""

from __future__ import annotations

import subprocess
import sys

LIMIT_SECONDS = 0.150
RUNS = 7


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_only_the_face_is_loaded() -> None:
    loaded = set(run("import dovetail, sys; print(*sys.modules)").split())
    assert "dovetail" in loaded
    heads = {name.partition(".")[0] for name in loaded}
    assert not heads & {"torch", "faiss", "numpy", "lark", "typer", "rich", "tokenizers"}
    assert not {m for m in loaded if m.startswith("dovetail.")}


def test_the_command_line_loads_what_computes_only_in_a_verb_that_needs_it() -> None:
    loaded = set(run("import dovetail.cli.app, sys; print(*sys.modules)").split())
    assert not loaded & {"torch", "numpy", "lark", "tokenizers"}
    heads = ("dovetail.compiler", "dovetail.codegen", "dovetail.runtime", "dovetail.topology")
    assert not {m for m in loaded if m.startswith(heads)}


def test_loading_an_artifact_needs_neither_torch_nor_the_compiler() -> None:
    loaded = set(run("import dovetail, sys; dovetail.load; print(*sys.modules)").split())
    assert "dovetail.runtime.app" in loaded
    assert not {m for m in loaded if m.partition(".")[0] in ("torch", "transformers", "lark")}
    assert not {m for m in loaded if m.startswith(("dovetail.compiler", "dovetail.codegen"))}


def test_import_takes_less_than_150_ms() -> None:
    script = "import time; a = time.process_time(); import dovetail; print(time.process_time() - a)"
    # of the CPU, and the smallest of several runs: a busy neighbour only ever adds time
    assert min(float(run(script)) for _ in range(RUNS)) < LIMIT_SECONDS
