"""What the pages say is there: verbs with their options, scripts with theirs, links, files."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from dovetail.cli.app import app
from dovetail.ir.workflow_file import read_workflow
from tests.repository import ROOT
from tests.test_layers import ROOMS

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMANDS = typer.main.get_command(app)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*\d")
"""Figures of two digits and more."""
MODULE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|c|cuh|dk))(?::[^`]*)?`")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def command_lines(text: str, program: str) -> Iterator[str]:
    """Yield what follows `program` in shell blocks and between back-quotes, to the line's end."""
    shell = [block for language, block in FENCE.findall(text) if language in ("", "sh")]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    lines += [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    for line in lines:
        found = re.search(rf"(?:^|\s|/){re.escape(program)}\s+(.*)", line)
        if found and not line.startswith("#"):
            yield re.split(r"\s+#\s|[|;]\s", found[1])[0]


def options_in(words: str) -> list[str]:
    return re.findall(r"(?<![\w-])--?[a-z][\w-]*", words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_verbs_have_the_options_that_are_named(page: Path) -> None:
    for line in command_lines(page.read_text(), "dovetail"):
        words, verbs = line.split(), [COMMANDS]
        while words and (inner := getattr(verbs[0], "commands", {})) and words[0][0] != "-":
            verbs = [inner[word] for word in words.pop(0).split("|")]
        known = [{n for option in verb.params for n in option.opts} | {"--help"} for verb in verbs]
        assert all(set(options_in(line)) <= names for names in known), f"dovetail {line}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_benchmarks_have_the_options_that_are_named(page: Path) -> None:
    for line in command_lines(page.read_text(), "python"):
        script, *_ = shlex.split(line, comments=True) or [""]
        if script.startswith("benchmarks/"):
            shared = (ROOT / "benchmarks/common.py").read_text()
            text = (ROOT / script).read_text() + shared
            for option in options_in(line):
                declared = f'"{option}"', f"    {option[2:]}: "  # by argparse, or by typer
                assert any(name in text for name in declared), line


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", FENCE.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


FOLDERS = (
    *"ir topology codegen compiler runtime dovetail tests benchmarks examples".split(),
    ".ci",
    "docs",
)
OF_A_READER = {"rag.py", "saxpy.dk"}


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Every file of the source tree, by its whole path and by each end of it."""
    paths = [path.relative_to(ROOT).parts for name in FOLDERS for path in (ROOT / name).rglob("*")]
    return {"/".join(parts[i:]) for parts in paths for i in range(len(parts))}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_source_files_that_are_named_exist(page: Path, files: set[str]) -> None:
    assert set(MODULE.findall(FENCE.sub("", page.read_text()))) <= files | OF_A_READER


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_that_python_blocks_import_are_there(page: Path) -> None:
    pytest.importorskip("faiss")
    for language, block in FENCE.findall(page.read_text()):
        nodes = ast.walk(ast.parse(block)) if language == "python" else ()
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dovetail"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), node.module


def test_workflows_on_pages_are_workflows() -> None:
    blocks = [block for page in PAGES for _, block in FENCE.findall(page.read_text())]
    found = [read_workflow(text).workflow() for text in blocks if text.startswith("name: ")]
    assert [workflow.name for workflow in found] == ["ask-on"]


@pytest.mark.parametrize("page", [ROOT / "docs/figures.md", ROOT / "docs/rag.md"], ids=name)
def test_figures_are_of_files_that_are_kept(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([\w/]+\.json)`", row)}
    assert named
    for name in named:
        assert (ROOT / "benchmarks/results" / name).is_file(), name


def test_the_comparison_has_only_figures_that_have_a_command() -> None:
    known = set(NUMBER.findall((ROOT / "docs/figures.md").read_text()))
    compared = NUMBER.findall((ROOT / "docs/comparison.md").read_text())
    assert len(compared) > 50 and set(compared) <= known, set(compared) - known


def test_rooms_are_listed_in_the_order_that_is_held() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## Rooms of the runtime")[1]
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)", section.split("\n## ")[0], re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")}
    assert list(dict.fromkeys(listed)) == [r for r in ROOMS["runtime"] if r in listed]
    assert folders - {"sim"} == set(listed) - {"app"}


def test_rooms_of_the_compiler_are_listed_in_the_order_that_is_held() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## Life of a compile")[1]
    listed = re.findall(r"`(\w+)(?:/|\.py)`", section.split("\n1. ")[0])
    assert listed == list(ROOMS["compiler"])
