"""The page as people use it, in a real browser, over a real server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import dovetail
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.index_file import EmbedderEntry, Passage
from tests.runtime.server.live import Live, http, serving

pytest.importorskip("faiss")
api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

Page = Any
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DESK, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
PROMPT = "Documents:\n- Melkar is the capital of Zorvia.\nQuestion: What is the capital?\nAnswer:"
TEXTS = ("Melkar is the capital of Zorvia.", "Zorvia lies on the river Ossa.", "Apples grow.")
KEY = "a-key"
BEGUN = re.compile(r"\S[\s\S]{8}")
ENDLESS = '{"ignore_eos": true, "max_tokens": 900}'


@pytest.fixture(scope="module")
def server(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("browser")
    passages = [Passage(key=str(i), text=text) for i, text in enumerate(TEXTS)]
    entry = EmbedderEntry(name="encoder", fingerprint="")
    with dovetail.load(artifacts["encoder"]) as encoder:
        build_index_folder(
            passages, encoder, entry, IndexRequest(output=folder / "idx"), lambda *_: None
        )
    flags = ("--workflow", "multistep", "--index", folder / "idx")
    flags += ("--speculative-config", '{"method": "suffix"}')
    with serving(*artifacts.values(), *flags, log=folder / "log") as live:
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def faults() -> list[str]:
    """What a page says is wrong; tests end with none."""
    return []


@pytest.fixture
def page(browser: Any, server: Live, faults: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport=DESK)
    found = open_page(context, faults)
    found.goto(server.url)
    found.wait_for_selector("#model option", state="attached")
    yield found
    context.close()
    assert not faults


def open_page(context: Any, faults: list[str]) -> Page:
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    return page


def choose(page: Page, model: str, **options: str) -> None:
    page.select_option("#model", model)
    if options:
        page.click("#options-button")
        for name, value in options.items():
            page.fill(f"#options [name={name}]", value)
        page.click("#options-button")


def send(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def answered(page: Page, count: int = 1) -> str:
    """Return the last answer, once `count` of them are complete."""
    api.expect(page.locator(".turn.assistant .stats")).to_have_count(count)
    found: str = page.locator(".turn.assistant .text").last.inner_text()
    return found


def pretend(page: Page, *deltas: dict[str, Any], asked: list[Any] | None = None) -> None:
    """Have the server's chats answer with these deltas."""
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, end])

    def reply(route: Any) -> None:
        if asked is not None:
            asked.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=body + "data: [DONE]\n\n")

    cards = {"data": [{"id": "made-up", "max_model_len": 99, "capabilities": ["chat"]}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=cards))
    page.route("**/v1/chat/completions", reply)
    page.reload()
    page.wait_for_selector("#model option", state="attached")


def test_a_chat_streams_and_is_edited_and_asked_again(page: Page, server: Live) -> None:
    choose(page, "llama", temperature="0", max_tokens="12")
    send(page, PROMPT)
    first = answered(page)
    body = {"model": "llama", "temperature": 0, "max_tokens": 12}
    offline = http.post(f"{server.v1}/completions", json={**body, "prompt": PROMPT}).json()
    said = http.post(
        f"{server.v1}/chat/completions",
        json={**body, "messages": [{"role": "user", "content": PROMPT}]},
    ).json()
    texts = [offline.get("choices"), said.get("choices")]
    known = [c[0].get("text") or c[0]["message"]["content"] for c in texts if c]
    assert first.strip() in [text.strip() for text in known]
    page.click("text=Regenerate")
    api.expect(page.locator(".turn.assistant .stats")).to_have_count(1)
    assert answered(page) == first
    page.click(".turn.user >> text=Edit")
    page.fill(".edit textarea", "Question: Where do apples grow?")
    page.keyboard.press("Enter")
    answered(page)
    assert page.locator(".turn.user .text").all_inner_texts() == ["Question: Where do apples grow?"]
    with page.expect_download() as download:
        page.click("#export-json")
    turns = json.loads(Path(download.value.path()).read_text())["turns"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    page.reload()
    answered(page)  # a conversation outlives the page
    page.click("#new")
    assert page.locator(".turn").count() == 0


def test_stop_ends_the_request_on_the_server(page: Page, server: Live) -> None:
    choose(page, "llama", more=ENDLESS)
    send(page, "Question:")
    api.expect(page.locator(".turn.assistant .text")).to_have_text(BEGUN)
    page.click("#stop")
    api.expect(page.locator(".stats")).to_contain_text("stopped")
    tile = {"metric": "num_requests_running", "labels": '{"model_name": "llama"}'}
    while read_figure(http.get(f"{server.url}/metrics").text, tile):
        page.wait_for_timeout(20)


def test_a_workflow_shows_its_steps_and_sources(page: Page) -> None:
    choose(page, "multistep")
    send(page, "What is the capital of Zorvia?")
    answered(page)
    page.click(".card >> text=steps")
    kinds = page.locator(".steps li").all_inner_texts()
    assert any("retrieval" in kind and "clusters" in kind for kind in kinds)
    assert any("generation" in kind for kind in kinds)
    page.click(".sources summary")
    assert "Zorvia" in page.locator(".sources ol").inner_text()


@contextmanager
def loaded(server: Live) -> Iterator[None]:
    """Keep a server busy with two requests at a time."""
    stop = Event()
    body = {"model": "llama", "prompt": "Once", "max_tokens": 200, "ignore_eos": True}

    def ask() -> None:
        while not stop.is_set():
            http.post(f"{server.v1}/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask) for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
    for one in asking:
        one.result()


def test_the_dashboard_shows_what_metrics_say_and_a_timeline_zooms(
    page: Page, server: Live
) -> None:
    with loaded(server):
        watch(page)


def watch(page: Page) -> None:
    seen: list[str] = []

    def pass_on(route: Any) -> None:
        reply = route.fetch()
        seen.append(reply.text())
        route.fulfill(response=reply)

    page.route("**/metrics", pass_on)
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")  # tabs go by keyboard
    api.expect(page.locator("#dashboard")).to_have_attribute("data-readings", re.compile("[2-9]"))
    page.click("text=Record 3 seconds")
    page.wait_for_selector(".timeline canvas")
    count, tiles = page.evaluate(
        "() => [Number(document.querySelector('#dashboard').dataset.readings),"
        " [...document.querySelectorAll('.tile .value[data-metric]')].map(t => ({...t.dataset}))]"
    )
    shown = {"num_requests_running", "kv_pool_usage_ratio", "spec_decode_num_accepted_tokens_total"}
    assert shown <= {tile["metric"] for tile in tiles}
    for tile in tiles:
        assert float(tile["value"]) == pytest.approx(read_figure(seen[count - 1], tile)), tile
    api.expect(page.locator("#dashboard")).to_contain_text(
        re.compile(r"decode \S+ of \d+, searches")
    )
    canvas = page.locator(".timeline canvas")
    api.expect(canvas).to_have_attribute("aria-label", re.compile(r"engine: \d+ spans"))
    whole = span(canvas)
    canvas.focus()
    page.keyboard.press("+")
    assert span(canvas) == pytest.approx(whole / 2, rel=1e-3)
    page.keyboard.press("0")
    assert span(canvas) == pytest.approx(whole)


def span(canvas: Any) -> float:
    ends = [float(canvas.get_attribute(f"data-{name}")) for name in ("to", "from")]
    return ends[0] - ends[1]


def read_figure(text: str, tile: dict[str, str]) -> float:
    wanted = [f'{name}="{value}"' for name, value in json.loads(tile["labels"]).items()]
    lines = [line for line in text.splitlines() if line.startswith(f"dovetail:{tile['metric']}{{")]
    values = [float(line.split()[-1]) for line in lines if all(part in line for part in wanted)]
    mean = tile["metric"].endswith("_ratio")
    return sum(values) / (len(values) if mean else 1)


HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

[a link](javascript:window.hacked=1) ![x](data:text/html,<script>hacked=1</script>)
[good](https://example.org) <https://example.org/`x`>

```html
<script>window.hacked = 1</script>
```
| a | <b onclick=hacked=1>b</b> |
|---|---|
| [c](vbscript:hacked) | `d` |
"""


def test_hostile_output_runs_nothing(page: Page) -> None:
    long = "[" * 20_000 + "*_`" * 20_000 + "x" * 200_000
    pretend(page, {"content": HOSTILE}, {"reasoning_content": HOSTILE}, {"content": f"\n{long}"})
    send(page, "<script>window.hacked = 1</script>")
    answered(page)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#messages :is(script, img, iframe, b, [onclick], [onerror])").count() == 0
    links = page.eval_on_selector_all("#messages a", "all => all.map(a => a.href)")
    assert links and all(link.startswith("https://example.org") for link in links)
    assert (
        "<script>window.hacked = 1</script>" in page.locator(".turn.assistant .text").inner_text()
    )


def test_calls_of_tools_and_reasoning_are_shown_and_results_go_back(page: Page) -> None:
    asked: list[Any] = []
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up"}}
    rest = {"index": 0, "function": {"arguments": '{"city": "Melkar"}'}}
    pretend(
        page,
        {"reasoning_content": "I should look."},
        {"tool_calls": [call]},
        {"tool_calls": [rest]},
        asked=asked,
    )
    send(page, "Who lives there?")
    answered(page)
    card = page.locator(".call")
    assert "look_up" in card.inner_text() and '"city": "Melkar"' in card.inner_text()
    page.click("text=Thinking")
    assert "I should look." in page.locator(".thinking").inner_text()
    card.locator("textarea").fill("Nobody.")
    card.locator("text=Send result").click()
    answered(page, 2)
    made = {"id": "c1", "type": "function"}
    made["function"] = {"name": "look_up", "arguments": '{"city": "Melkar"}'}
    assert asked[1]["messages"][1]["tool_calls"] == [made]
    assert asked[1]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "Nobody."}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_no_serious_fault_for_who_cannot_see_or_point(
    browser: Any, server: Live, faults: list[str], size: dict[str, int], scheme: str
) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme, bypass_csp=True)
    page = open_page(context, faults)
    page.goto(server.url)
    page.wait_for_selector("#model option", state="attached")
    choose(page, "multistep")
    send(page, "What is the capital of Zorvia?")
    answered(page)
    check(page)
    page.click("#options-button")
    check(page)
    page.click("#options-button")  # on a phone, too, it is not covered
    page.click("#tab-dashboard")
    page.wait_for_selector(".tile")
    page.click("text=Record 3 seconds")
    page.wait_for_selector(".timeline canvas")
    check(page)
    page.goto(f"{server.url}/docs")
    page.wait_for_selector(".endpoint")
    page.locator(".endpoint summary").first.click()
    check(page)
    context.close()
    assert not faults


def check(page: Page) -> None:
    found = axe.Axe().run(page).response["violations"]
    shown = [
        (v["id"], [n["html"][:200] for n in v["nodes"]])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert not shown
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0


def test_a_key_is_asked_for_once_also_behind_a_prefix(
    browser: Any, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    with serving(artifacts["llama"], "--api-key", KEY, log=tmp_path / "log") as server:
        context = browser.new_context()
        faults: list[str] = []
        page = open_page(context, faults)
        prefix = f"{server.url}/some/prefix/"

        def strip(route: Any) -> None:  # as a proxy does
            route.fulfill(response=route.fetch(url=route.request.url.replace("/some/prefix", "")))

        page.route(f"{prefix}**", strip)
        page.goto(prefix)
        for key in ("wrong", KEY):
            page.fill("dialog input", key)
            page.click("dialog >> text=Continue")
        page.wait_for_selector("#model option", state="attached")
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        assert page.locator("dialog").count() == 0
        context.close()
        assert all("401" in fault for fault in faults)  # the browser tells of refused calls


def test_the_api_page_lists_every_endpoint_and_calls_them(page: Page, server: Live) -> None:
    page.goto(f"{server.url}/docs")
    page.wait_for_selector(".endpoint")
    document = http.get(f"{server.url}/openapi.json").json()
    shown = set(page.locator(".endpoint .path").all_inner_texts())
    assert shown == set(document["paths"])
    box = page.locator("[id='POST /v1/embeddings']")
    box.locator("summary").click()
    box.locator("textarea").fill(json.dumps({"model": "encoder", "input": ["a text"]}))
    box.locator("text=Send").click()
    api.expect(box.locator(".reply .head")).to_contain_text("200")
    assert "embedding" in box.locator(".reply pre").inner_text()
