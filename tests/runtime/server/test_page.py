"""The pages at `/` and `/docs`, without a browser: what they load, and how they may be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.runtime.server.small_endpoints import FOLDER
from tests.runtime.server.live import Live, http, serving

FILES = sorted(Path(str(FOLDER)).iterdir())
REFERENCE = re.compile(r"""(?:src|href|from|import)\s*[=(]?\s*["']([^"'#]+)["']""")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_loads_only_files_of_this_server_that_are_there(live: Live, path: str) -> None:
    page = http.get(live.url + path)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    wanted = {f"/{name}" for name in REFERENCE.findall(page.text) if name.startswith("ui/")}
    assert wanted
    while wanted:
        name = wanted.pop()
        file = http.get(live.url + name)
        assert file.status_code == 200, name
        if name.endswith(".js"):
            wanted |= {f"/ui/{n[2:]}" for n in REFERENCE.findall(file.text) if n.startswith("./")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_name_no_other_host_and_parse_no_html(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"""["'(]\s*(?:https?:)?//[a-z]""", text.replace("www.w3.org", ""))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", text
    )
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=\"|style=\"", text)
    assert not re.search(r"""(?:src|href)="/""", text), "absolute: breaks behind a prefix"


def test_pages_allow_no_script_from_elsewhere_and_are_kept_by_browsers(live: Live) -> None:
    page = http.get(f"{live.url}/ui/main.js")
    policy = dict(
        rule.strip().partition(" ")[::2]
        for rule in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    again = http.get(f"{live.url}/ui/main.js", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_pages_need_no_key_but_what_they_show_does(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--api-key", "secret")
    with serving(artifacts["encoder"], *flags, log=tmp_path / "log") as server:
        for path in ("/", "/docs", "/ui/style.css"):
            assert http.get(server.url + path).status_code == 200
        for path in ("/v1/models", "/openapi.json", "/timeline"):
            assert http.get(server.url + path).status_code == 401


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "99", "x"])
def test_a_timeline_of_no_sensible_length_is_refused(live: Live, seconds: str) -> None:
    reply = http.get(f"{live.url}/timeline?seconds={seconds}")
    assert reply.status_code == 400 and "seconds" in reply.json()["error"]["message"]


def test_models_tell_what_they_can_do(live: Live) -> None:
    cards = {
        card["id"]: card["capabilities"] for card in http.get(f"{live.v1}/models").json()["data"]
    }
    assert "generate" in cards["llama"] and cards["encoder"] == ["embed", "rerank"]
