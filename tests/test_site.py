"""The documentation site builds without a warning, and needs no network to be read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer

from dovetail.cli.app import app
from tests.repository import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'dovetail[docs]'")

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that fetch something when a page is opened, and from where."""
MERMAID = ROOT / "docs/assets/mermaid.tiny.js"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        [*command, "--config-file", str(ROOT / "mkdocs.yml")],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Fetched(HTMLParser):
    """What a page fetches by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        if url := given.get(LOADS.get(tag, "")):
            self.urls.append(url)


def test_pages_fetch_only_files_of_the_site(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        found = Fetched()
        found.feed(page.read_text())
        for url in found.urls:
            assert "//" not in url, f"{page}: {url}"
            if page.name != "404.html":  # which is served below any address
                assert (page.parent / url.partition("?")[0]).is_file(), f"{page}: {url}"
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"url\((?!['\"]?data:)([^)]*)\)|@import\s+([^;]+)", sheet.read_text())
        assert not [url for pair in urls for url in pair if "//" in url], sheet


def test_mermaid_is_the_file_that_its_note_names_and_is_where_diagrams_are(site: Path) -> None:
    note = MERMAID.with_name("mermaid.txt").read_text()
    assert sha256(MERMAID.read_bytes()).hexdigest() in note
    assert (site / "assets" / MERMAID.name).is_file()
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert ('class="mermaid"' in text) == (MERMAID.name in text), page


def test_every_verb_has_a_page_with_its_options(site: Path) -> None:
    for name, verb in typer.main.get_command(app).commands.items():
        page = site / "verbs" / f"{'index-build' if name == 'index' else name}.html"
        text = page.read_text()
        for each in getattr(verb, "commands", {"": verb}).values():
            for option in each.params:
                known = option.opts[-1] in text or option.name in text
                assert known or option.hidden, f"{name}: {option.name}"


def test_the_interface_of_python_is_on_its_page(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in ("load", "App.generate", "SamplingParams", "App.submit_workflow"):
        assert re.search(rf'id="dovetail\.[\w.]*{name}"', text), name


@pytest.mark.long
def test_diagrams_are_drawn_in_a_browser_without_a_network(site: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for name, least in (("concepts", 6), ("architecture", 1), ("rag", 4)):
            page.goto((site / f"{name}.html").as_uri())
            page.wait_for_function(
                "n => document.querySelectorAll('div.mermaid').length >= n", arg=least
            )
            assert page.locator("pre.mermaid").count() == 0
        browser.close()
    assert asked and all(url.startswith("file:") for url in asked), asked
