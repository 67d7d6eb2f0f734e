"""Attacks on a server: each is refused in one sentence while others are served; memory stays."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import attacks
from attack_requests import ATTACKS, chat, post, read, send
from attacks import MODEL, QUESTION, served
from http_servers import Listening

SCRIPT = ROOT / "benchmarks" / "attacks.py"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with served(tmp_path_factory.mktemp("attacked")) as found:
        yield found


def healthy(at: Listening) -> bool:
    with urllib.request.urlopen(f"http://{at.host}:{at.port}/health/ready", timeout=60) as reply:
        return bool(reply.status == 200)


def answer(at: Listening, request: bytes) -> str:
    """Return status and message of a request's reply."""
    import socket

    with socket.create_connection((at.host, at.port), timeout=60) as line:
        line.sendall(request)
        return read(line)


def attack_once(name: str, at: Listening, until: float) -> str:
    return send(ATTACKS[name], ATTACKS[name].parts(), at.host, at.port, until)


SLOW = "headers that never end"
"""Until the server's own timeout ends it."""


@pytest.mark.parametrize(
    "name",
    [n if n != SLOW else pytest.param(n, marks=pytest.mark.long) for n in ATTACKS],
)
def test_an_attack_is_refused_in_a_sentence(at: Listening, name: str) -> None:
    found: list[str] = []
    until = time.monotonic() + 60
    attacker = threading.Thread(target=lambda: found.append(attack_once(name, at, until)))
    attacker.start()
    assert healthy(at)
    assert answer(at, chat(MODEL, QUESTION)).startswith("200 ")
    attacker.join()
    status, _, message = found[0].partition(" ")
    assert int(status) in ATTACKS[name].statuses, found
    if int(status) >= 400:
        assert 10 < len(message) <= 160 and "\n" not in message and "Traceback" not in message
    assert healthy(at)


def test_a_hanging_template_costs_its_own_request_alone(at: Listening) -> None:
    """The server goes on rendering with the same template, in another process."""
    assert not attack_once("template that never ends", at, 0).startswith("200 ")
    assert answer(at, chat(MODEL, QUESTION)).startswith("200 ")
    streamed = {"model": MODEL, "prompt": "Zorvia", "max_tokens": 3, "stream": False}
    assert answer(at, post("/v1/completions", streamed)).startswith("200 ")


def run_script(report: Path, *options: str) -> list[dict[str, object]]:
    """Return the rows of a run."""
    command = [sys.executable, str(SCRIPT), "--json", str(report), *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    rows: list[dict[str, object]] = json.loads(report.read_text())["rows"]
    return rows


def check(row: dict[str, object]) -> None:
    """What holds on any machine: honest clients get right answers, and memory comes back."""
    assert row["wrong"] == 0, row
    assert int(str(row["answer"]).split()[0]) in ATTACKS[str(row["attack"])].statuses, row
    assert float(str(row["share"])) > 0, row


@pytest.mark.long
def test_the_benchmark_writes_a_row(tmp_path: Path) -> None:
    name = "completion of 10 MB"
    (row,) = run_script(
        tmp_path / "a.json", "--attacks", name, "--seconds", "1", "--rounds", "1", "--streams", "2"
    )
    assert row["attack"] == name and row["bar"] == 0.9
    check(row)


@pytest.mark.long
def test_honest_clients_are_served_through_all_attacks(tmp_path: Path) -> None:
    for row in run_script(tmp_path / "a.json", "--seconds", "4", "--rounds", "3"):
        check(row)
        before, after = (float(str(row[f"memory_{when}_mb"])) for when in ("before", "after"))
        assert after - before < 128, row


def test_an_unknown_attack_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attacks.main(["--attacks", "none"])
    assert "workflow input of 10 MB" in capsys.readouterr().err
