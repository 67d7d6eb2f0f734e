"""The report of `dovetail inspect`, opened from a file in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import dovetail as face
from dovetail.compiler.pipeline import compile_model
from dovetail.tiny_world import LLAMA
from dovetail.workflows import one_shot
from tests.dovetail.commands import dovetail

api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DESK, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    artifact, trace, page = folder / "app.dove", folder / "trace.json", folder / "report.html"
    compile_model(LLAMA, output=artifact, effort="none", workflows=[one_shot(topk=2)])
    with face.load(artifact) as app, app.record(trace):
        app.generate(["Who founded Komosburg?"] * 3, max_tokens=8)
    options = ("--html", page, "--timeline", trace)
    assert dovetail("inspect", artifact, *options).code == 0
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_opens_from_a_file_zooms_and_is_accessible(
    report: Path, size: dict[str, int], scheme: str
) -> None:
    faults, asked = list[str](), list[str]()
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context: Any = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(report.as_uri())
        canvas = page.locator("#recorded canvas")
        whole = float(canvas.get_attribute("data-to"))
        assert whole > 0
        page.click("[aria-label='Zoom in']")
        first = [float(canvas.get_attribute(f"data-{end}")) for end in ("from", "to")]
        assert first[1] - first[0] == pytest.approx(whole / 2, rel=0.01)
        canvas.focus()
        page.keyboard.press("+")
        again = [float(canvas.get_attribute(f"data-{end}")) for end in ("from", "to")]
        assert again[1] - again[0] == pytest.approx(whole / 4, rel=0.01)
        page.click("[aria-label='Show all']")
        assert float(canvas.get_attribute("data-to")) == pytest.approx(whole)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.evaluate(
            "[...document.images].every((image) => image.complete && image.naturalWidth > 0)"
        )
        found = axe.Axe().run(page).response["violations"]
        serious = [v["id"] for v in found if v["impact"] in ("serious", "critical")]
        assert serious == []
        browser.close()
    assert faults == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
