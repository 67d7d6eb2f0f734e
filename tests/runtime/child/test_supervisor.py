"""A supervised process is replaced when it dies or hangs, and ends with its parent, silently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from queue import SimpleQueue

import pytest

from dovetail.ir.errors import DeviceError, DovetailError, RequestError, SpecError
from dovetail.runtime.child.child import Child, ChildLate, ChildLost, StartError
from dovetail.runtime.child.framing import pack_value
from dovetail.runtime.child.supervisor import Supervisor
from dovetail.runtime.child.watch import STARTS, Reading
from tests.processes import running
from tests.runtime.child.echo_worker import Word
from tests.runtime.conftest import ROOT

WORKER = "tests.runtime.child.echo_worker"


class Echo(Supervisor[Word]):
    """Keeps a process; `said` has what it says and how it ends, in turn."""

    def __init__(self, first: str = "hello") -> None:
        super().__init__(Word, closed="closed", send_seconds=10, patience=0.5)
        self.said: SimpleQueue[Word | str | DovetailError] = SimpleQueue()
        self.first, self.starts, self._busy = first, 0, False
        with self._lock:
            self._ensure()

    def _launch(self) -> Child:
        self.starts += 1
        return Child.start(WORKER, "the process {}")

    def _set_up(self, child: Child) -> None:
        child.set_up(Word(self.first), Word)

    def _send_waiting(self) -> None:
        self.said.put("ready")

    def _hear(self, message: Word) -> None:
        self.said.put(message)

    def _look(self) -> Reading:
        return Reading(self._busy, 0.0)

    def _lose(self, why: str) -> None:
        self._busy = False
        self.said.put(why)

    def _fail_all(self, error: DovetailError) -> None:
        self.said.put(error)

    def say(self, text: str, *, busy: bool = False) -> None:
        with self._lock:
            self._ensure()
            self._busy = busy
            assert self._outbox is not None
            self._outbox.post(pack_value(Word(text)))


@pytest.fixture(autouse=True)
def _children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    echo = Echo()
    seen = []
    try:
        for text, busy, why in (("die", False, "ended with status 3"), ("sleep", True, "hung")):
            assert echo.said.get(timeout=60) == "ready" and echo.ready
            echo.say("a")
            word = echo.said.get(timeout=60)
            assert isinstance(word, Word) and word == Word("a", echo.pid or 0)
            seen.append(word.pid)
            echo.say(text, busy=busy)
            assert f"the process {word.pid} {why}" in str(echo.said.get(timeout=60))
        assert echo.said.get(timeout=60) == "ready" and echo.deaths == 2
    finally:
        echo.close()
    assert running(seen) == [] and echo.pid is None
    assert "the process" in str(echo.said.get(timeout=60))
    assert isinstance(echo.said.get(timeout=60), RequestError)


@pytest.mark.parametrize(
    ("word", "error", "starts"), [("die", StartError, STARTS), ("fail", SpecError, 1)]
)
def test_one_that_cannot_start_is_given_up(
    word: str, error: type[DovetailError], starts: int
) -> None:
    """What died may do better the next time; what says why will say so again."""
    echo = Echo(word)
    try:
        assert isinstance(echo.said.get(timeout=60), error) and echo.starts == starts
        echo.first = "hello"
        with echo._lock:
            echo._ensure()  # the next one asks
        assert echo.said.get(timeout=60) == "ready"
    finally:
        echo.close()


def test_where_one_has_served_the_next_is_tried_again_whatever_it_says() -> None:
    echo = Echo()
    try:
        assert echo.said.get(timeout=60) == "ready" and echo.pid is not None
        echo.first = "fail"
        os.kill(echo.pid, signal.SIGKILL)
        assert "SIGKILL" in str(echo.said.get(timeout=60))
        assert isinstance(echo.said.get(timeout=60), SpecError) and echo.starts == STARTS
    finally:
        echo.close()


def test_one_that_dies_again_and_again_with_nothing_to_do_is_given_up() -> None:
    echo = Echo()
    try:
        assert echo.said.get(timeout=60) == "ready"
        echo.say("a")  # the first one was of use
        assert isinstance(echo.said.get(timeout=60), Word)
        for left in reversed(range(STARTS + 1)):
            assert echo.pid is not None
            os.kill(echo.pid, signal.SIGKILL)
            assert "SIGKILL" in str(echo.said.get(timeout=60))
            last = echo.said.get(timeout=60)
            assert last == "ready" if left else isinstance(last, DeviceError)
        assert not echo.ready and "SIGKILL" in echo.failure and echo.starts == STARTS + 1
        with echo._lock:
            echo._ensure()
        assert echo.said.get(timeout=60) == "ready"
    finally:
        echo.close()


class Faulty(Echo):
    """Meets a fault of the program at its first start."""

    def _set_up(self, child: Child) -> None:
        if self.starts == 1:
            raise ZeroDivisionError("by zero")
        super()._set_up(child)


def test_a_fault_of_the_program_at_a_start_fails_what_waits() -> None:
    echo = Faulty()
    try:
        assert isinstance(found := echo.said.get(timeout=60), DeviceError)
        assert "ZeroDivisionError: by zero" in str(found)
        with echo._lock:
            echo._ensure()
        assert echo.said.get(timeout=60) == "ready"
    finally:
        echo.close()


def test_a_question_has_an_answer_an_error_or_an_end() -> None:
    child = Child.start(WORKER, "the process {}")
    try:
        assert child.ask(Word("a"), Word, 60).pid == child.pid
        with pytest.raises(ChildLate):
            child.ask(None, Word, 0.05)
        with pytest.raises(SpecError, match="no such word"):
            child.ask(Word("fail"), Word, 60)
        with pytest.raises(ChildLost):
            child.ask(Word("a"), Word, 60)
    finally:
        child.kill()
    assert running([child.pid]) == []


PARENT = """
from tests.runtime.child.test_supervisor import Echo
echo = Echo()
assert echo.said.get() == "ready"
print(echo.pid, flush=True)
"""


def test_an_interpreter_that_ends_says_nothing() -> None:
    """No thread of ours is left behind to fail, and no process."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert running([int(done.stdout)]) == []
