"""A process that is forked off an app is refused what its parent's threads do, and ends none."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable

from dovetail.ir.errors import RequestError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START
from dovetail.runtime.app import load
from dovetail.runtime.child.child import Child
from dovetail.runtime.child.launch import LocalProcess
from dovetail.runtime.text.template_worker import Rendered, RenderLimits, Teach
from tests.runtime.embed.test_service import alone, ids
from tests.runtime.embed.toy_encoders import Toy
from tests.runtime.test_app import MakeArtifact


def is_refused_in_a_fork(call: Callable[[], object]) -> bool:
    child = os.fork()
    if child == 0:
        code = 2
        try:
            call()
        except RequestError as error:
            code = 0 if "forked off" in str(error) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_engine_of_a_process_is_its_parents(make_artifact: MakeArtifact) -> None:
    with load(make_artifact(), apart=True) as app:
        (before,) = app.generate([1, 2], max_tokens=3)
        assert is_refused_in_a_fork(lambda: app.submit([1, 2], max_tokens=3))
        assert app.generate([1, 2], max_tokens=3)[0].token_ids == before.token_ids


def test_encoders_are_their_parents() -> None:
    with alone(Toy()) as service:
        assert is_refused_in_a_fork(lambda: service.submit([ids(1, 2)]))
        assert len(service.submit([ids(1, 2)]).result(60)) == 1


def test_workflows_that_have_run_are_their_parents(make_artifact: MakeArtifact) -> None:
    graph = RAGraph("twice")
    graph.add_function("twice", lambda state: 2 * len(str(state["input"])), output="y")
    graph.add_edge(START, "twice")
    graph.add_edge("twice", END)
    with load(make_artifact()) as app:
        assert app.run(graph, {"input": "ab"}).outputs["y"] == 4
        assert is_refused_in_a_fork(lambda: app.submit_workflow(graph, {"input": "a"}))
        assert app.run(graph, {"input": "abc"}).outputs["y"] == 6


def test_who_leaves_a_fork_ends_nothing(make_artifact: MakeArtifact) -> None:
    program = (
        "import os, sys; from dovetail.runtime.app import load;"
        "app = load(sys.argv[1], apart=True);"
        "before = app.generate([1, 2], max_tokens=3); child = os.fork();"
        "child or sys.exit();"
        "os.waitpid(child, 0); after = app.generate([1, 2], max_tokens=3);"
        "print(after[0].token_ids == before[0].token_ids, app.generator.host.deaths)"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", program, make_artifact()],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (found.stdout, found.returncode) == ("True 0\n", 0), found.stderr


def test_a_fork_does_not_kill_children_of_its_parent() -> None:
    """Not even one that a thread of the parent waits for, by a lock that no fork ever gets."""
    child = Child.start("dovetail.runtime.text.template_worker", "the process {}")
    member = child.member
    assert isinstance(member, LocalProcess)
    threading.Thread(target=member.wait, args=(math.inf,), daemon=True).start()
    while not member.process._waitpid_lock.locked():  # type: ignore[attr-defined]
        pass
    fork = os.fork()
    if fork == 0:
        try:
            child.end()
        finally:
            os._exit(0)
    os.waitpid(fork, 0)
    child.tell(RenderLimits(256 << 20, 0))
    assert child.ask(Teach("key", "a template", {}), Rendered) == Rendered()
    child.end()
