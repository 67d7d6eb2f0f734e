"""Where the repository lies, and what its modules import (read from their syntax)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "dovetail": ROOT / "dovetail",
    "dovetail.codegen": ROOT / "codegen",
    "dovetail.compiler": ROOT / "compiler",
    "dovetail.ir": ROOT / "ir",
    "dovetail.runtime": ROOT / "runtime",
    "dovetail.tiny_world": ROOT / "examples/tiny_world",
    "dovetail.topology": ROOT / "topology",
}


def module_files() -> dict[str, Path]:
    """Map every module name of the product to its file; packages map to their `__init__.py`."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            files[name] = path
    return files


@cache
def imported_names(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """Return (dotted name, line, typing only) of each import; `from a import b` as `a.b`."""
    return tuple(_imported_names(path))


def _imported_names(path: Path) -> Iterator[tuple[str, int, bool]]:
    tree = ast.parse(path.read_text())
    typing_only = {id(n) for block in _typing_blocks(tree) for n in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) in typing_only


def _typing_blocks(tree: ast.AST) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield node
