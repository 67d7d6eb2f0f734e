"""What each attack costs those who use the server meanwhile: streams, health, and new chats.

Eight clients stream completions without a pause, another asks for health every 20 ms, and a new
chat of one token begins twice a second. Each attack (`attack_requests.py`) runs in turns with as
many seconds of peace, in a niced process. `share`: of the tokens/s in peace. Memory is that of the
server and its children, before the first attack of a kind and after its last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from attack_requests import ATTACKS, HANGING_TEMPLATE, WORKFLOW, chat
from common import Report
from http_client import Connection
from http_overhead import make_prompts, request_body
from http_servers import PATH, Listening, serve_dovetail

HEALTH = b"GET /health/ready HTTP/1.1\r\nhost: a\r\n\r\n"
BEAT, CHAT_GAP = 0.02, 0.5
"""Seconds between questions for health, and between chats."""
SETTLE = 2.0
"""Seconds behind an attack of which nothing is counted."""
PATIENCE = 30.0
"""Seconds after which a reply that does not come counts as having taken so long."""
PROMPT, ANSWER = 16, 16
"""Tokens of an honest request."""
CONFIG = "tokenizer_config.json"
MODEL, QUESTION = "llm", "Where does Zorvia lie?"


@dataclass(slots=True)
class Seen:
    """What honest clients saw in a while: tokens, and seconds of health replies and of chats."""

    tokens: int = 0
    health: list[float] = field(default_factory=list)
    chats: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)


class Clients:
    """Those who use the server as they should; `seen` may be replaced at any time."""

    def __init__(self, at: Listening) -> None:
        self._at, self.seen = at, Seen()

    async def stream(self, prompt: list[int]) -> None:
        """Stream completions, one behind the other."""
        body = request_body(prompt, ANSWER, stream=True)
        connection = await Connection.open(self._at.host, self._at.port)
        while True:
            reply = await connection.post(PATH, body)
            if reply.status != 200 or b'"error"' in reply.body:
                self.seen.wrong["stream"] += 1
            else:
                self.seen.tokens += ANSWER

    async def beat(self) -> None:
        """Ask for health again and again."""
        while True:
            status = await self._time(HEALTH, self.seen.health)
            self.seen.wrong["health"] += status != b"200"
            await asyncio.sleep(BEAT)

    async def talk(self) -> None:
        """Begin a chat again and again."""
        while True:
            status = await self._time(chat(MODEL, QUESTION), self.seen.chats)
            self.seen.wrong["chat"] += status != b"200"
            await asyncio.sleep(CHAT_GAP)

    async def _time(self, request: bytes, taken: list[float]) -> bytes:
        """Send a request on a connection of its own; return the status, none in PATIENCE."""
        start = time.perf_counter()
        status = b""
        with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, IndexError):
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection(self._at.host, self._at.port)
                writer.write(request)
                status = (await reader.readuntil(b"\r\n")).split()[1]
                writer.close()
        taken.append(time.perf_counter() - start)
        return status

    async def watch(self, seconds: float) -> Seen:
        """Return what is seen in the next seconds."""
        self.seen = Seen()
        await asyncio.sleep(seconds)
        return self.seen


async def attack(name: str, at: Listening, seconds: float) -> dict[str, int]:
    """Attack from a process of its own for some seconds; return what was answered, with counts."""
    script = Path(__file__).with_name("attack_requests.py")
    command = ["nice", "-n", "19", sys.executable, str(script), name, at.host, str(at.port)]
    process = await asyncio.create_subprocess_exec(
        *command, str(seconds), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    found: dict[str, int] = json.loads(out)
    return found


def memory_mb(pid: int) -> float:
    """Return the megabytes that a process and its children hold; shared pages count once."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    held = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            held += process.memory_full_info().pss
    return held / 1e6


async def measure(at: Listening, names: Sequence[str], options: Any) -> list[dict[str, Any]]:
    """Return a row for each attack."""
    clients = Clients(at)
    prompts = make_prompts(options.streams, PROMPT, 512)
    running = [asyncio.ensure_future(clients.stream(prompt)) for prompt in prompts]
    running += [asyncio.ensure_future(clients.beat()), asyncio.ensure_future(clients.talk())]
    rows = []
    await clients.watch(options.seconds)  # warm-up
    for name in names:
        before = memory_mb(at.pid)
        shares, during, answers = [], Seen(), Counter[str]()
        for _ in range(options.rounds):
            peace = await clients.watch(options.seconds)
            attacking = asyncio.ensure_future(attack(name, at, options.seconds))
            seen = await clients.watch(options.seconds)
            answers.update(await attacking)
            await clients.watch(SETTLE)
            shares.append(seen.tokens / max(1, peace.tokens))
            during.health += seen.health
            during.chats += seen.chats
            during.wrong.update(seen.wrong)
        answer, count = answers.most_common(1)[0]
        rows.append(
            {
                "attack": name,
                "share": median(shares),
                "least_share": min(shares),
                "bar": ATTACKS[name].share,
                "health_p99_ms": 1e3 * percentile(during.health, 99),
                "chat_max_s": max(during.chats, default=PATIENCE),
                "wrong": sum(during.wrong.values()),
                "memory_before_mb": before,
                "memory_after_mb": memory_mb(at.pid),
                "sent": answers.total(),
                "answer": answer,
                "alike": count,
            }
        )
        print(rows[-1], flush=True)
    for task in running:
        task.cancel()
    return rows


def percentile(values: Sequence[float], share: int) -> float:
    """Return a percentile, PATIENCE of too few values."""
    return quantiles(values, n=100)[share - 1] if len(values) > 1 else PATIENCE


@contextmanager
def served(folder: Path) -> Iterator[Listening]:
    """Serve the bundled model, with a template that can hang, an encoder, and a workflow."""
    from dovetail.compiler.pipeline import compile_model
    from dovetail.tiny_world import ENCODER, LLAMA

    model = folder / MODEL
    shutil.copytree(LLAMA, model)
    config = json.loads((model / CONFIG).read_text()) | {"chat_template": HANGING_TEMPLATE}
    (model / CONFIG).write_text(json.dumps(config))
    paths = [folder / "llm.dove", folder / "encoder.dove"]
    for source, path in zip((model, ENCODER), paths, strict=True):
        compile_model(source, output=path, effort="none")
    workflow = folder / "ask.py"
    workflow.write_text(WORKFLOW)
    options = ["--workflow", str(workflow), "--served-model-name", MODEL]
    with serve_dovetail(*paths, options=[*options, "--served-model-name", "encoder"]) as at:
        yield at


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--streams", type=int, default=8, help="honest ones")
    parser.add_argument("--seconds", type=float, default=6.0, help="of an attack, and of peace")
    parser.add_argument("--rounds", type=int, default=3, help="of peace and attack")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names, default all")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    options = parser.parse_args(arguments)
    names = options.attacks.split(",")
    if not set(names) <= set(ATTACKS):
        parser.error(f"--attacks takes {','.join(ATTACKS)}")
    report = Report("attacks", {k: getattr(options, k) for k in ("streams", "seconds", "rounds")})
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as at:
        report.rows = asyncio.run(measure(at, names, options))
    report.summary = {
        "shares_met": sum(row["share"] >= row["bar"] for row in report.rows),
        "attacks": len(report.rows),
        "health_p99_ms": max(row["health_p99_ms"] for row in report.rows),
        "chat_max_s": max(row["chat_max_s"] for row in report.rows),
    }
    report.print()
    report.write(options.json)


if __name__ == "__main__":
    main()
