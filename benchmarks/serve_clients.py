"""Servers of one GGUF file with 1, 8 and 16 clients, over HTTP: `dovetail serve` beside its peers.

Run `DOVETAIL_PEERS=DIR python benchmarks/serve_clients.py --json F`. llama.cpp's server reads the
same file; vLLM's, where it is installed, the same weights in bfloat16. All servers of a file run
at once and are asked in turns: each client sends its requests one after the other, random tokens
in, a fixed number out. Tokens per second are those of the answers, over the seconds from the first
request to the last token; time to first token is a median over all requests, and `first_ttft_ms`
that of the first request after the start. `ratio` is the median over rounds, above 1 = Dovetail
is faster, `bound` what it exceeds with a probability of 0.99 (it takes seven rounds).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    BUSY_LIMIT,
    QUIET_TRIES,
    Region,
    Report,
    add_report_options,
    add_work_option,
    open_report,
    parse_numbers,
    sample,
    speedup,
    timed_region,
    work_folder,
)
from dovetail.cli.serve_client import run_load
from dovetail.cli.serve_load import Planned
from dovetail.topology.hardware import read_hardware
from generate import OURS, find_models, make_file, prepare_peer
from generate_models import SHAPES, WIDTHS
from generate_peers import installed_peers
from generate_workers import peak_bytes
from http_servers import DIRECTORY, SERVERS, Listening, serve_dovetail

SHOWN = ("model", "width", "clients", "side", "tokens_s", "spread", "ttft_ms", "first_ttft_ms")
SHOWN += ("peak_mb", "ready_s", "ratio", "bound", "ttft_ratio", "noisy")
STREAMING = ("llamacpp", "vllm")
"""Peers whose servers stream."""


@dataclass(slots=True)
class Side:
    """What one server did with so many clients."""

    seconds: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    noisy: int = 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_report_options(parser)
    parser.add_argument("--models", default="smollm2", help="smollm2, GGUF files, or shapes")
    parser.add_argument("--widths", default="Q4_0,BF16", help=",".join(WIDTHS))
    parser.add_argument("--clients", type=parse_numbers, default=(1, 8, 16), help="at once")
    parser.add_argument("--prompt", type=int, default=256, help="tokens in")
    parser.add_argument("--answer", type=int, default=128, help="tokens out")
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=7, help="of each side per cell")
    parser.add_argument("--threads", type=int, default=read_hardware().usable_threads)
    parser.add_argument("--peers", default=",".join(STREAMING), help=",".join(STREAMING))
    parser.add_argument("--quick", action="store_true", help="one short round, nothing run again")
    add_work_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.prompt, options.answer = 1, 1, 16, 8
    for name, known in (("widths", WIDTHS), ("peers", STREAMING)):
        chosen = [part for part in getattr(options, name).split(",") if part]
        if not set(chosen) <= set(known):
            parser.error(f"--{name} takes {','.join(known)}")
        setattr(options, name, chosen)
    numbers = (*options.clients, options.rounds, options.requests, options.prompt, options.answer)
    if min(numbers) < 1:
        parser.error("--clients, --rounds, --requests, --prompt and --answer must be at least 1")
    options.models = find_models(parser, options.models.split(","))
    options.peers = installed_peers(options.peers, SERVERS)
    return options


def run_benchmark(options: argparse.Namespace, work: Path) -> Report:
    """Measure every file that is not in the report; files are made in `work`."""
    names = ("clients", "prompt", "answer", "requests", "rounds", "threads", "peers")
    config = {name: getattr(options, name) for name in names}
    report = open_report("serve_clients", options, config, names)
    done = {(row["model"], row["width"]) for row in report.rows}
    for model, source in options.models.items():
        for width in options.widths:
            if (model, width) in done or (file := make_file(model, source, width, work)) is None:
                continue
            place = {"model": model, "width": width}
            with ExitStack() as stack:
                servers = start_servers(stack, options, file, width, work)
                for row in measure_servers(options, servers):
                    report.rows.append({**place, **row})
                    print(describe(report.rows[-1]), flush=True)
            report.summary = summarise(report.rows)
            report.write(options.json)  # what is done survives an interruption
    report.summary = summarise(report.rows)
    return report


def start_servers(
    stack: ExitStack, options: argparse.Namespace, file: Path, width: str, work: Path
) -> dict[str, Listening]:
    """Start all servers of a file; ours has compiled it before, so that readiness is a load."""
    slots = max(options.clients)
    context = options.prompt + options.answer + 64
    with serve_dovetail(file):
        pass
    threads = ("--threads", str(options.threads))
    servers = {OURS: stack.enter_context(serve_dovetail(file, options=threads))}
    for name in options.peers:
        if reads := SERVERS[name].reads(width):
            model = prepare_peer(name, file, work) if reads == DIRECTORY else file
            serving = SERVERS[name].serve(model, options.threads, slots, context)
            servers[name] = stack.enter_context(serving)
    return servers


def measure_servers(
    options: argparse.Namespace, servers: Mapping[str, Listening]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of clients and each server."""
    firsts = {name: ask(server, options, 1, -1)[1][0] for name, server in servers.items()}
    for clients in options.clients:
        sides = {name: Side() for name in servers}
        for turn in range(options.rounds):
            for name, side in sides.items():
                measure_round(side, servers[name], options, clients, turn)
        for name, side in sides.items():
            found = sample(side.seconds, side.noisy)
            row = {
                "clients": clients,
                "side": name,
                "tokens_s": clients * options.requests * options.answer / found.median,
                "spread": found.spread,
                "ttft_ms": statistics.median(side.ttft) * 1e3,
                "first_ttft_ms": firsts[name] * 1e3,
                "peak_mb": peak_bytes(servers[name].pid) / 1e6,
                "ready_s": servers[name].seconds,
                "noisy": side.noisy,
            }
            if name != OURS:
                row |= speedup(sides[OURS].seconds, side.seconds)
                mine = statistics.median(sides[OURS].ttft)
                row["ttft_ratio"] = statistics.median(side.ttft) / mine
            yield row


def measure_round(
    side: Side, server: Listening, options: argparse.Namespace, clients: int, turn: int
) -> None:
    """Run one round of a server; again while other processes disturb it."""
    best: tuple[Region, list[float]] | None = None
    tries = 1 if options.quick else QUIET_TRIES
    for number in range(tries):  # each with prompts of its own: known ones would cost less
        region, ttft = ask(server, options, clients, turn * tries + number)
        if best is None or region.others < best[0].others:
            best = region, ttft
        if region.quiet:
            break
    assert best is not None, "QUIET_TRIES must be positive"
    side.seconds.append(best[0].seconds)
    side.ttft += best[1]
    side.noisy += best[0].others > BUSY_LIMIT


def ask(
    server: Listening, options: argparse.Namespace, clients: int, turn: int
) -> tuple[Region, list[float]]:
    """Have clients send their requests; return the time it took, and times to first tokens.

    Raises SystemExit where an answer fails or has another length.
    """
    count = clients * (options.requests if turn >= 0 else 1)
    first = 100_000 * clients + 1000 * (turn + 1)
    planned = [Planned(0.0, options.prompt, options.answer, seed=first + i) for i in range(count)]
    with timed_region() as region:
        found, _ = asyncio.run(run_load(server.target(clients), planned))
    for timing in found:
        if timing.error or timing.output_tokens != options.answer:
            reason = timing.error or f"it has {timing.output_tokens} tokens"
            raise SystemExit(f"an answer is not as asked for: {reason}")
    return region, [timing.ttft for timing in found]


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the lower bounds `served_WIDTH_vs_PEER_CLIENTS`, of the real models' rows, each.

    `..._ttft_...` are ratios of the medians of the times to the first token.
    """
    summary: dict[str, float | None] = {}
    for row in rows:
        if row["side"] == OURS or row["model"] in SHAPES:
            continue
        place = f"{row['side']}_{row['clients']}"
        for part, column in (("served", "bound"), ("served_ttft", "ttft_ratio")):
            name = f"{part}_{row['width'].lower()}_vs_{place}"
            known = [value for value in (summary.get(name), row[column]) if value is not None]
            summary[name] = min(known, default=None)
    return summary


def describe(row: Mapping[str, Any]) -> str:
    """Return one line about a server."""
    more = f", ours is {row['ratio']:.2f}x" if "ratio" in row else ""
    return (
        f"{row['model']} {row['width']} {row['side']}, clients {row['clients']}: "
        f"{row['tokens_s']:.0f} tokens/s, first token after {row['ttft_ms']:.0f} ms "
        f"(of the first request {row['first_ttft_ms']:.0f} ms){more}"
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parse_arguments()
    with work_folder(options.work) as work:
        report = run_benchmark(options, work)
    report.print([name for name in SHOWN if any(name in row for row in report.rows)])
    report.write(options.json)


if __name__ == "__main__":
    main()
