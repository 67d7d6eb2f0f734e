"""`dovetail run` as users meet it: models, standard input, and a talk on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

import dovetail as face
from dovetail.cli import model_cache
from dovetail.cli.model_cache import find_artifact
from dovetail.cli.run import choose_sampling
from dovetail.cli.talk import TokenRate
from dovetail.errors import SpecError
from dovetail.ir.options import LIVELY
from tests.caches import link_cache
from tests.dovetail.commands import assert_one_sentence, compile_with, dovetail

QUESTION = "Question: What is the capital of Zorvia? Answer:"
ON_A_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
MAIN = "from dovetail.cli import main; main()"
STOPPED = """
import signal
from dovetail.cli.model_cache import find_artifact
from dovetail.cli.talk import TokenRate
from dovetail.errors import SpecError

count = TokenRate.count

def interrupt(self, tokens, now):
    TokenRate.count = count
    count(self, tokens, now)
    signal.raise_signal(signal.SIGINT)  # while the first answer is on its way

TokenRate.count = interrupt
"""
PATIENCE = 240
"""Seconds until a program that says nothing is given up, whatever the machine is busy with."""


class Terminal:
    """A program on a terminal of its own, and what it has written there."""

    def __init__(self, *arguments: object, script: str = "") -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                ON_A_TERMINAL + script + "\n" + MAIN,
                *map(str, arguments),
            ],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> str:
        """Return what is written up to `text`; it does not come again."""
        end = time.monotonic() + PATIENCE
        while text not in self.text:
            ready, _, _ = select.select([self._ours], [], [], end - time.monotonic())
            assert ready, f"no {text!r} in {self.text!r}"
            self.text += os.read(self._ours, 1 << 16).decode().replace("\r\n", "\n")
        before, _, self.text = self.text.partition(text)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: object, script: str = "") -> Terminal:
        opened.append(Terminal(*arguments, script=script))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def shown(text: str | None) -> str:
    """Return a text as a terminal shows it between the line that was typed and the pace."""
    assert text
    return text.replace("\r\n", "\n")


def test_a_talk_has_a_history_and_ends_with_its_input(
    artifact: Path, open_terminal: Callable[..., Terminal]
) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    terminal = open_terminal(
        "run", artifact, "--deterministic", "--system", "Be brief.", "--max-tokens", 40
    )
    with face.load(artifact, deterministic=True) as app:
        for _ in range(3):
            terminal.wait_for("> ")
            terminal.type(QUESTION + "\n")
            messages.append({"role": "user", "content": QUESTION})
            answer = app.chat(messages, max_tokens=40)
            messages.append(answer.message)
            terminal.wait_for(QUESTION + "\n")
            said = terminal.wait_for("\ndovetail: ")
            assert said.lstrip("\r\x1b[?204l") == shown(answer.text)
            count = len(answer.token_ids)
            assert re.fullmatch(
                rf"{count} tokens, [\d.]+ tokens/s, the first after [\d.]+ s",
                terminal.wait_for("\n"),
            )
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0


def test_ctrl_c_stops_an_answer_and_not_the_program(
    artifact: Path, open_terminal: Callable[..., Terminal]
) -> None:
    terminal = open_terminal("run", artifact, "--ignore-eos", script=STOPPED)
    terminal.wait_for("> ")
    terminal.type("\x03")  # nothing runs: a hint, and the next line
    terminal.type("\n")  # readline sees a Ctrl-C that came before it waited only at the next key
    terminal.wait_for("Ctrl-C stops an answer, Ctrl-D ends\n")
    terminal.wait_for("> ")
    terminal.type(QUESTION + "\n")
    terminal.wait_for("dovetail: the answer was stopped\n")
    terminal.wait_for(" tokens/s, ")
    terminal.wait_for("> ")
    terminal.type(QUESTION + "\n")
    terminal.wait_for(" tokens/s, ")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0


def test_ctrl_c_ends_the_answer_to_a_single_prompt_on_a_line_of_its_own(
    artifact: Path, open_terminal: Callable[..., Terminal]
) -> None:
    asked = ("run", artifact, "--ignore-eos", "-p", QUESTION)
    later = STOPPED.replace(
        "    TokenRate.count = count\n",
        "    if not self.tokens:\n        return count(self, tokens, now)\n",
    )
    terminal = open_terminal(*asked, script=later)
    assert terminal.wait_for("\ndovetail: the answer was stopped\n")
    assert "nothing half-made" not in terminal.wait_for(" tokens/s, ")
    assert terminal.process.wait(PATIENCE) == 2


def test_errors_do_not_end_a_talk(artifact: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("run", artifact, "--system", "a " * 2000)
    for _ in range(2):
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for("dovetail: the context holds 1024 tokens")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0


def test_a_model_is_compiled_into_the_cache_once(
    model: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert artifact.is_dir()  # its kernels are in the cache
    monkeypatch.setenv("DOVETAIL_CACHE", str(link_cache(tmp_path)))
    monkeypatch.chdir(model.parent)
    with face.load(artifact) as app:
        text = app.chat([{"role": "user", "content": QUESTION}]).message.content
    for name, said in ((model, True), (model, False), (model.name, False)):
        command = [sys.executable, "-P", "-c", MAIN, "run", str(name), "-p", QUESTION]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ("compiling" in found.stderr) == said
        assert found.stdout == f"{text}\n"


def test_tokens_are_drawn_as_the_model_advises(model: Path, tmp_path: Path) -> None:
    hot = shutil.copytree(model, tmp_path / "hot")
    advice = {"do_sample": True, "temperature": 40.0, "top_k": 50, "eos_token_id": 1}
    (hot / "generation_config.json").write_text(json.dumps(advice))
    artifact = tmp_path / "hot.dove"
    face.compile(hot, output=artifact, effort="none")
    asked = ("run", artifact, "-p", QUESTION, "--max-tokens", 12, "--seed", 3)
    conversation = [{"role": "user", "content": QUESTION}]
    with face.load(artifact) as app:
        for options, given in (
            ({"temperature": 40.0, "top_k": 50}, ()),
            ({"temperature": 40.0, "top_k": 2}, ("--top-k", 2)),
            ({}, ("--temperature", 0)),
        ):
            wanted = app.chat(conversation, max_tokens=12, seed=3, **options)
            assert dovetail(*asked, *given).out == f"{wanted.message.content}\n"
        greedy = app.chat(conversation, max_tokens=12)
    assert dovetail(*asked).out != f"{greedy.message.content}\n"


def test_a_talk_draws_tokens_where_nobody_says_how() -> None:
    assert choose_sampling({}, {"n": 1}, talks=True) == {**LIVELY, "n": 1}
    assert choose_sampling({}, {}, talks=False) == {}
    assert choose_sampling({"temperature": 0.0}, {}, talks=True) == {"temperature": 0.0}
    assert choose_sampling({"top_p": 0.5}, {"top_k": 3}, talks=True) == {"top_p": 0.5, "top_k": 3}


def test_standard_input_is_a_prompt(artifact: Path) -> None:
    command = [sys.executable, "-P", "-c", MAIN, "run", str(artifact)]
    given = dovetail("run", artifact, "-p", QUESTION)
    piped = subprocess.run(
        command, input=QUESTION + "\n", capture_output=True, text=True, check=False
    )
    assert (piped.returncode, piped.stdout) == (0, given.out) and " tokens/s" in piped.stderr
    for wrong, locale in (
        (b" \n", "C.UTF-8"),
        (b"\xff\xfe", "C.UTF-8"),
        (b"\xff\xfe", "C"),  # which reads such bytes as surrogates
    ):
        ended = subprocess.run(
            command,
            input=wrong,
            capture_output=True,
            check=False,
            env={**os.environ, "LC_ALL": locale},
        )
        assert ended.returncode == 2 and ended.stderr.count(b"dovetail: ") == 1
        assert (b"is not UTF-8" in ended.stderr) == (wrong == b"\xff\xfe")


def test_an_empty_answer_is_explained(artifact: Path) -> None:
    for options in ((), ("--raw",), ("--json",), ("-p", "two")):
        result = dovetail("run", artifact, "-p", QUESTION, "--stop", "T", "--stop", " ", *options)
        assert result.code == 0
        assert "the answer is empty: it began with a text" in result.out + result.err, options


def test_a_model_without_a_template_continues_texts(model: Path, tmp_path: Path) -> None:
    base = compile_with(model, tmp_path, None)
    told = dovetail("run", base, "-p", QUESTION, "--max-tokens", 9)
    raw = dovetail("run", base, "-p", QUESTION, "--max-tokens", 9, "--raw")
    assert told.out == raw.out
    lines = [line for line in told.err.splitlines() if "chat template" in line]
    assert len(lines) == 1 and "no chat template" not in raw.err
    for options in ((), ("--raw",)):
        result = dovetail("run", base, "-p", "x", "--system", "y", *options)
        assert result.code == 2 and "--system needs the chat template" in result.err


def test_wrong_options_are_told_before_a_model_is_compiled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    for option in (("--temperature", -1), ("--max-tokens", 0), ("--dtype", "bf17")):
        result = dovetail("run", model, "-p", "x", *option)
        assert_one_sentence(result)
        assert option[0].strip("-").replace("-", "_") in result.err
    unheard = dovetail("run", model, "--prompt-ids", "1,2", "--system", "Be brief.")
    assert_one_sentence(unheard)
    assert "--system goes through the chat template" in unheard.err
    assert_one_sentence(dovetail("serve", model, "--port", 0, "--dtype", "bf17"))
    assert not (tmp_path / "cache/models").exists()


def test_a_model_without_a_tokenizer_is_asked_by_token_ids(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tokenizer.json").unlink()
    output = tmp_path / "bare.dove"
    assert dovetail("compile", bare, "-o", output, "--effort", "none").code == 0
    for options in ((), ("--raw",)):
        result = dovetail("run", output, "-p", "x", *options)
        assert_one_sentence(result)
        assert "give token ids: --prompt-ids 1,2,3" in result.err
    assert dovetail("run", output, "--prompt-ids", "1,2,3", "--max-tokens", 2).code == 0


def test_a_cache_is_read_that_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even locks can be made there: their names are those of folders."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(link_cache(tmp_path)))
    found = find_artifact(model, {})
    Path(f"{found}.lock").unlink()
    Path(f"{found}.lock").mkdir()
    assert find_artifact(model, {}) == found
    monkeypatch.setenv("DOVETAIL_CACHE", "/dev/null")
    with pytest.raises(SpecError, match="set DOVETAIL_CACHE to a folder"):
        find_artifact(model, {})


def test_a_model_that_a_cache_cannot_take_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(link_cache(tmp_path)))
    lock = Path(f"{find_artifact(model, {})}.lock")
    lock.unlink()
    lock.mkdir()  # so that no file of that name can be made
    monkeypatch.setattr(model_cache, "_fits", lambda _path: False)
    with pytest.raises(SpecError, match=r"cannot use the cache .* set DOVETAIL_CACHE to a folder"):
        find_artifact(model, {})


def test_who_waits_for_the_compile_of_another_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(link_cache(tmp_path)))
    other, said = filelock.FileLock(f"{find_artifact(model, {})}.lock"), list[str]()

    def tell(line: str) -> None:
        said.append(line)
        other.release()

    monkeypatch.setattr(model_cache, "tell", tell)
    monkeypatch.setattr(model_cache, "_fits", lambda _path: bool(said))
    with other:
        assert Path(f"{find_artifact(model, {})}.lock") == Path(other.lock_file)
    (line,) = said
    assert line.startswith("another process compiles") and model.name in line


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name in ("b.gguf", "a.gguf"):
        (files / name).touch()
    for path, why in (
        (tmp_path, "is neither an artifact"),
        (tmp_path / "none.gguf", f"there is no file or directory {tmp_path}/none.gguf"),
        (files, f"is a directory with 2 GGUF files; give one, such as {files}/a.gguf"),
    ):
        result = dovetail("run", path, "-p", "x")
        assert_one_sentence(result)
        assert why in result.err


def test_an_artifact_takes_no_options_of_a_compile(artifact: Path) -> None:
    result = dovetail("run", artifact, "-p", "x", "--weight-dtype", "f32")
    assert_one_sentence(result)
    assert "--weight-dtype" in result.err


def test_the_pace_counts_what_came_after_the_first_tokens() -> None:
    pace = TokenRate(start=10.0)
    assert str(pace) == "0 tokens"
    pace.count(1, 10.5)
    assert str(pace) == "1 token, 2.0 tokens/s, the first after 0.50 s"
    pace.count(4, 11.5)
    assert str(pace) == "5 tokens, 4.0 tokens/s, the first after 0.50 s"
