"""Tuning while a server is idle: children of their own, ended by requests, results switched to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from dovetail.cli.idle_tuning import IdleTuner
from dovetail.cli.model_cache import TuningJob, find_artifacts, find_untuned
from dovetail.compiler.pipeline import compile_model
from dovetail.errors import ArtifactError, SpecError
from dovetail.tiny_world import LLAMA
from tests.caches import link_cache
from tests.runtime.server.live import Live, http, serving

WAIT = 120.0
CHILD = """
import os, sys
with open(sys.argv[1], "w") as begun: begun.write(str(os.getpgid(0)))
with open(sys.argv[2]) as gate: code = int(gate.read() or 9)
sys.exit(code)
"""
"""Says that it has begun, then ends with the code that it is given."""


class Child:
    """A job whose child tells when it begins, and ends when it is told to."""

    def __init__(self, folder: Path, name: str) -> None:
        self.begun, self.gate = folder / f"{name}.begun", folder / f"{name}.gate"
        os.mkfifo(self.begun)
        os.mkfifo(self.gate)
        command = (sys.executable, "-c", CHILD, str(self.begun), str(self.gate))
        self.job = TuningJob(name, command, folder / name)

    def await_begin(self) -> int:
        return int(self.begun.read_text())

    def end(self, code: int) -> None:
        self.gate.write_text(str(code))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[IdleTuner, list[Child], Any]]]:
    made: list[IdleTuner] = []

    def make_(*names: str) -> tuple[IdleTuner, list[Child], Any]:
        switched: SimpleQueue[str] = SimpleQueue()
        children = [Child(tmp_path, name) for name in names]

        def switch(job: TuningJob) -> None:
            switched.put(job.name)
            if job.name == "damaged":
                raise ArtifactError("damaged")

        made.append(IdleTuner([child.job for child in children], 0.0, switch))
        return made[-1], children, switched

    yield make_
    for tuner in made:
        tuner.close()


def test_results_are_switched_to_one_after_the_other(
    make: Callable[..., tuple[IdleTuner, list[Child], Any]],
) -> None:
    tuner, (one, damaged, two), switched = make("one", "damaged", "two")
    tuner.idle()
    for child in (one, damaged, two):
        child.await_begin()
        child.end(0)
        assert switched.get(timeout=WAIT) == child.job.name


def test_a_request_ends_the_child_and_idleness_begins_another(
    make: Callable[..., tuple[IdleTuner, list[Child], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tuner, (child, failing, last), switched = make("one", "failing", "last")
    tuner.idle()
    group = child.await_begin()
    tuner.busy()
    while _lives(group):  # it was ended, and buried
        pass
    tuner.idle()
    assert child.await_begin() != group
    child.end(0)
    assert switched.get(timeout=WAIT) == "one"
    failing.await_begin()
    failing.end(3)  # is not tried again
    group = last.await_begin()
    assert switched.empty()
    tuner.close()
    assert not _lives(group)
    said = [record.message for record in caplog.records if "stopped" in record.message]
    assert [words.split()[2:4] for words in said] == [["for", "requests;"], ["with", "the"]]


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_artifacts_by_rules_are_tuned_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the job's command makes, here by rules, is what the next start serves."""
    given, weights = tmp_path / "app.dove", "models/llm/weights/weights.bin"
    compile_model(LLAMA, output=given, effort="none")
    monkeypatch.setenv("DOVETAIL_CACHE", str(link_cache(tmp_path)))
    assert find_artifacts([str(given)], ["app"], {"max_context": 64}) == {"app": given}
    with pytest.raises(
        SpecError, match=r"app\.dove is compiled already and takes no --weight-dtype"
    ):
        find_artifacts([str(given)], ["app"], {"max_context": 64, "weight_dtype": "int8"})
    (job,) = find_untuned([str(given)], {"app": given}, {"max_context": 64}, 8.0)
    wanted = ("compile", str(given), "-o", str(job.output), "--effort", "fast", "--budget", "8.0s")
    assert job.command[-8:] == wanted
    compile_model(given, output=job.output, effort="none")
    assert find_artifacts([str(given)], ["app"], {}) == {"app": job.output}
    assert (job.output / weights).samefile(given / weights)
    # Schedules that are not of this machine are measured again, in place of what is served
    assert find_untuned([str(given)], {"app": job.output}, {"max_context": 64}, 8.0) == [job]
    made, tuned = tmp_path / "llama-key.dove", tmp_path / "llama-key.tuned.dove"
    for link in (made, tuned):
        link.symlink_to(given)
        (again,) = find_untuned([str(LLAMA)], {"llama": link}, {"max_context": 64}, None)
        assert again.output == tuned
        assert again.command[-4:] == ("--max-context", "64", "--effort", "fast")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["model", "artifact"])
def test_a_server_tunes_and_switches_without_a_restart(tmp_path: Path, kind: str) -> None:
    cache = link_cache(tmp_path)
    env, log = {"DOVETAIL_CACHE": str(cache)}, tmp_path / "log"
    flags = ("--tune", "idle", "--tune-after", 0.5, "--tune-budget", 8)
    served = LLAMA
    if kind == "artifact":
        served = tmp_path / "llama.dove"
        compile_model(LLAMA, output=served, effort="none")
    with serving(served, *flags, log=log, env=env) as server:
        await_line(log, "measuring schedules")
        before = answer(server)  # ends the child
        said = await_line(log, "is served with measured schedules", "could not be compiled")
        assert "is served" in said
        assert answer(server) == before
    assert "stopped for requests" in log.read_text() and "Traceback" not in log.read_text()
    assert (cache / "tuning.jsonl").stat().st_size > 0
    with serving(served, *flags, log=log, env=env) as server:
        await_line(log, "nothing is left to tune")
        assert answer(server) == before
    assert "compiling" not in log.read_text() and "measuring" not in log.read_text()


def await_line(log: Path, *texts: str) -> str:
    """Return the first line of a log that has one of `texts` in it."""
    command = ["tail", "-n", "+1", "-f", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        found = next(line for line in tail.stdout if any(text in line for text in texts))
        tail.kill()
    return found


def answer(server: Live) -> str:
    body = {"prompt": "Question: What is the capital of Zorvia?\nAnswer:", "max_tokens": 12}
    reply = http.post(f"{server.v1}/completions", json=body)
    assert reply.status_code == 200
    return str(reply.json()["choices"][0]["text"])
