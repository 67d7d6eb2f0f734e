"""What an open dashboard costs a server under load: CPU time of its processes, in turns.

Clients stream completions of the bundled Llama at a constant rate, which the server keeps without
effort. In every other turn a headless browser shows the dashboard. `watched` and `unwatched` are
parts of a core that the server's own process took; `all_*` adds its children (the engine, which
spins between steps). Needs Playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright

from common import Report, family, process_seconds
from http_client import Connection
from http_overhead import make_prompts, request_body
from http_servers import PATH, serve_dovetail

CONNECTIONS = 16
PROMPT, ANSWER, VOCABULARY = 16, 32, 512
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


def used_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process so far, and of it and all its children."""
    return process_seconds(pid), sum(map(process_seconds, family(pid)))


async def ask(host: str, port: int, rate: float, seconds: float) -> int:
    """Stream completions at a constant rate; return how many."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await Connection.open(host, port))
    bodies = [
        request_body(prompt, ANSWER, stream=True)
        for prompt in make_prompts(int(rate * seconds), PROMPT, VOCABULARY)
    ]
    start = time.perf_counter()

    async def one(number: int, body: bytes) -> None:
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        connection = await free.get()
        reply = await connection.post(PATH, body)
        free.put_nowait(connection)
        if reply.status != 200 or b"data: [DONE]" not in reply.body:
            raise SystemExit(f"a stream failed: {reply.body[-300:]!r}")

    await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies)))
    while not free.empty():
        free.get_nowait().close()
    return len(bodies)


async def take_turns(options: argparse.Namespace, host: str, port: int, pid: int) -> list[Any]:
    """Return a row for each turn."""
    rows = []
    async with async_playwright() as play:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = await play.chromium.launch(executable_path=chromium, args=list(FLAGS))
        await ask(host, port, options.rate, 2.0)
        for turn in range(2 * options.pairs):
            page = await watch(browser, host, port) if (turn + 1) // 2 % 2 else None
            before, start = used_seconds(pid), time.perf_counter()
            requests = await ask(host, port, options.rate, options.seconds)
            seconds = time.perf_counter() - start
            own, all_ = ((b - a) / seconds for a, b in zip(before, used_seconds(pid), strict=True))
            readings = 0
            if page is not None:
                readings = int(await page.get_attribute("#dashboard", "data-readings") or 0)
                await page.close()
            rows.append(
                {
                    "watched": page is not None,
                    "own": own,
                    "all": all_,
                    "seconds": seconds,
                    "requests": requests,
                    "readings": readings,
                }
            )
        await browser.close()
    return rows


async def watch(browser: Any, host: str, port: int) -> Page:
    """Open the dashboard, and wait until it has read something."""
    page: Page = await browser.new_page()
    await page.goto(f"http://{host}:{port}/#dashboard")
    await page.wait_for_selector("#dashboard[data-readings]")
    return page


def measure(options: argparse.Namespace, artifact: Path) -> Report:
    """Return the report: a row for each turn, and the medians."""
    config = {name: getattr(options, name) for name in ("rate", "seconds", "pairs")}
    report = Report("watching", {**config, "answer": ANSWER})
    with serve_dovetail(artifact) as server:
        report.rows = asyncio.run(take_turns(options, server.host, server.port, server.pid))
    for part, name in (("own", ""), ("all", "all_")):
        sides = {
            side: [row[part] for row in report.rows if row["watched"] is side]
            for side in (True, False)
        }
        watched, unwatched = (statistics.median(sides[side]) for side in (True, False))
        report.summary[f"{name}watched"] = watched
        report.summary[f"{name}unwatched"] = unwatched
        report.summary[f"{name}cost"] = watched - unwatched
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each turn")
    parser.add_argument("--pairs", type=int, default=3, help="of turns with and without a watcher")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    options = parser.parse_args(arguments)
    from dovetail.compiler.pipeline import compile_model
    from dovetail.tiny_world import LLAMA

    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "llama.dove"
        compile_model(LLAMA, output=artifact, effort="none")
        report = measure(options, artifact)
    report.print()
    report.write(options.json)


if __name__ == "__main__":
    main()
