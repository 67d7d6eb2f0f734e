"""One call followed by a profiler: how many of our files who reads along has to open."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dovetail
from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import App
from dovetail.tiny_world import ENCODER, LLAMA
from tests.repository import FOLDERS, ROOT

QUESTION = "Question: What is the capital of Zorvia? Answer:"
ROOMS = {folder.name for folder in FOLDERS.values()}
MOST = {"generate": 15, "embed": 10}
"""Files of ours that run in a call of a warm app. A larger number wants a reason. Of each: the
workers' seats, which say who has which CPUs."""
OWN_CLOCK = "division"
"""The thread that looks at the CPUs' load once in a while: no call waits for it."""


class Followed:
    """Which files of ours run for calls, on all threads; while `on`, it takes note."""

    def __init__(self) -> None:
        self.on, self.files = False, set[str]()

    def profile(self, frame: FrameType, event: str, _arg: object) -> None:
        if self.on and event == "call" and threading.current_thread().name != OWN_CLOCK:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
                self.files.add(path.relative_to(ROOT).as_posix())

    @contextmanager
    def following(self) -> Iterator[None]:
        before = sys.getprofile()
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            threading.setprofile(before)
            sys.setprofile(before)


def generate(app: App) -> None:
    (found,) = app.generate(QUESTION, max_tokens=8, ignore_eos=True)
    assert len(found.token_ids) == 8


def embed(app: App) -> None:
    assert app.embed([QUESTION]).shape[0] == 1


@pytest.mark.parametrize(("call", "model"), [(generate, LLAMA), (embed, ENCODER)])
def test_a_call_goes_through_few_files(
    call: Callable[[App], Any], model: Path, tmp_path: Path
) -> None:
    compile_model(model, output=tmp_path / "a.dove", effort="none", threads=1)
    followed = Followed()
    with followed.following(), dovetail.load(tmp_path / "a.dove") as app:
        call(app)  # warm
        followed.on = True
        call(app)
        followed.on = False
    assert "runtime/app.py" in followed.files
    assert any(file.startswith("runtime/native/") for file in followed.files)
    assert len(followed.files) <= MOST[call.__name__], sorted(followed.files)
