"""How many files of ours a request passes through, in the process of the app."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from dovetail import workflows
from dovetail.runtime.app import App

ROOT = Path(__file__).parents[3]
ROOMS = ("ir", "runtime", "dovetail")
MOST = {"run": 30, "generate": 14}


def test_a_warm_request_passes_few_files(open_app: Callable[..., App]) -> None:
    passed: set[str] = set()

    def note(frame: FrameType, event: str, found: object) -> None:
        passed.add(frame.f_code.co_filename)

    threading.setprofile(note)  # of threads that begin from now on
    try:
        app = open_app(apart=True)
        app.add_workflow(workflows.one_shot(topk=2, max_tokens=6, answer="{docs} w1 {input}"))
        ask: dict[str, Callable[[str], object]] = {
            "run": lambda text: app.run("one-shot", {"input": text}),
            "generate": lambda text: app.generate(text, max_tokens=6),
        }
        for kind, most in MOST.items():
            seen = []
            for number in range(6):
                passed.clear()
                sys.setprofile(note)
                ask[kind](f"w{number} w3")
                sys.setprofile(None)
                rooms = tuple(f"{ROOT / room}/" for room in ROOMS)
                seen.append({file for file in passed if file.startswith(rooms)})
            plainest = min(seen[1:], key=len)
            assert len(plainest) <= most, (kind, sorted(plainest))
    finally:
        threading.setprofile(None)
