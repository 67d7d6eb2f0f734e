"""Runs the command line in this process, with its output and exit code caught."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from dovetail.cli import main
from dovetail.compiler.pipeline import compile_model


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def dovetail(*arguments: object) -> Result:
    """Run `dovetail arguments` without input; what is no exit with a code fails the test."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    handler, hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    given, sys.stdin = sys.stdin, io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        finally:
            signal.signal(signal.SIGTERM, handler)
            sys.unraisablehook, sys.stdin = hook, given
    return Result(code, out.getvalue(), err.getvalue())


def with_command(folder: Path) -> dict[str, str]:
    """Return an environment in which `dovetail`, in `folder`/bin, and `python` are ours."""
    script = folder / "bin/dovetail"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable} -P\nfrom dovetail.cli import main\nmain()\n")
    script.chmod(0o755)
    folders = str(script.parent), str(Path(sys.executable).parent), os.environ["PATH"]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


def assert_one_sentence(result: Result, code: int = 2) -> None:
    """The exit code is `code`, stderr holds one line of ours."""
    assert result.code == code, result
    assert result.err.startswith("dovetail: ") and result.err.endswith("\n"), result.err
    assert len(result.err.splitlines()) == 1, result.err


def compile_with(model: Path, folder: Path, template: str | None) -> Path:
    """Return the artifact of a copy of `model` that has another chat template, or none."""
    copy = shutil.copytree(model, folder / "copy")
    file = copy / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": template}
    file.write_text(json.dumps(config))
    compile_model(copy, output=folder / "copy.dove", effort="none", threads=1)
    return folder / "copy.dove"
