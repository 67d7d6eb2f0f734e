"""What mkdocs does beside rendering docs/: `make docs`.

In: pages as they lie in the repository, whose links also lead out of docs/. Out: the site's pages:
README and its like and the examples among them, links turned to where these are, tables of options
in the place of `<!-- options: VERB -->`, and Mermaid where there is a diagram.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from dovetail.cli.app import app

ROOT = Path(__file__).parents[1]
MOVED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "LICENSE": "license.md",
    "examples/tiny_world/README.md": "examples/tiny_world.md",
}
"""A file outside of docs/ -> the page that shows it."""
FOLDERS = {"examples": "examples.md", "docs/notes": "notes/README.md"}
"""A folder that pages link to -> the page that shows it."""
ICON = "runtime/server/web/icon.svg"
SCRIPT = "assets/mermaid.tiny.js"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
OPTIONS = re.compile(r"<!-- options: ([a-z ]+) -->")
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    made = {uri: (ROOT / path).read_text() for path, uri in MOVED.items()}
    made["license.md"] = f"# Licence\n\n```text\n{made['license.md']}```\n"
    scripts = sorted(p for p in (ROOT / "examples").iterdir() if p.suffix in (".py", ".dk"))
    for script in scripts:
        made[example_page(script.name)] = show_example(script)
    made["examples.md"] = list_examples(scripts)
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(ROOT / ICON)))
    return files


def example_page(name: str) -> str:
    """Return the page of a file of examples/."""
    return f"examples/{name.replace('.', '-')}.md"


def show_example(script: Path) -> str:
    """Return the page of an example: its text."""
    return f"# {script.name}\n\n```python\n{script.read_text()}```\n"


def list_examples(scripts: list[Path]) -> str:
    """Return the page that lists the examples, by the first sentences of their docstrings."""
    rows = []
    for script in scripts:
        first = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[0]
        rows.append(f"| [{script.name}]({script.name}) | {' '.join(first.split())} |")
    head = "# Examples\n\nSmall programs to start from; a test runs each of them. The models that "
    head += "they are tried with are [bundled](tiny_world/README.md).\n\n"
    return head + "| file | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site, and put tables of options in."""
    here = page.file.src_uri
    source = next((path for path, uri in MOVED.items() if uri == here), f"docs/{here}")
    folder = "examples" if here == FOLDERS["examples"] else posixpath.dirname(source)

    def turn(link: re.Match[str]) -> str:
        file, mark, anchor = link[1].partition("#")
        target = posixpath.normpath(posixpath.join(folder, file))
        uri = find_page(target)
        if uri is None or files.get_file_from_path(uri) is None:
            log.warning("%s: the site has no page for %s", source, target)
            return link[0]
        return f"]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{mark}{anchor})"

    text = outside_fences(markdown, lambda part: LINK.sub(turn, part))
    return OPTIONS.sub(lambda found: "\n".join(option_table(found[1])), text)


def find_page(target: str) -> str | None:
    """Return the page, or picture, of the site that shows a path of the repository."""
    if known := {**MOVED, **FOLDERS}.get(target):
        return known
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    folder, name = posixpath.split(target)
    return example_page(name) if folder == "examples" else None


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Return `text` with `change` made to all but its blocks of code."""
    parts, last = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join((*parts, change(text[last:])))


def option_table(verb: str) -> Iterator[str]:
    """Yield the lines of a table of a verb's arguments and options."""
    command: Any = typer.main.get_command(app)
    for word in verb.split():
        command = command.commands[word]
    yield "| option | default | what it does |"
    yield "|---|---|---|"
    for option in command.params:
        if option.name == "help" or getattr(option, "hidden", False):
            continue
        named = option.param_type_name == "option"
        name = ", ".join(f"`{each}`" for each in option.opts) if named else f"`{option.name}`"
        default = option.default if isinstance(option.default, str | int | float) else None
        plain = default is None or isinstance(default, bool) or default == ""
        shown = "" if plain else f"`{default}`"
        text = (getattr(option, "help", None) or "").replace("|", "\\|")
        yield f"| {name} | {'required' if option.required else shown} | {text} |"


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Load Mermaid where there is a diagram: the theme uses it, else it would fetch one."""
    if 'class="mermaid"' not in output:
        return output
    where = get_relative_url(SCRIPT, page.url)
    return output.replace("</head>", f'<script src="{where}"></script></head>', 1)
