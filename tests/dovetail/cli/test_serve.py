"""The server's flags: what a file of them sets, and an address that cannot be had."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path

import pytest
import typer

from dovetail.cli.app import app
from dovetail.cli.serve import HttpFlags, ModelFlags, read_config
from dovetail.errors import SpecError
from dovetail.tiny_world import LLAMA
from tests.dovetail.commands import assert_one_sentence, dovetail


@pytest.fixture
def context() -> typer.Context:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return typer.Context(group.commands["serve"])


def test_keys_without_a_value_set_nothing(context: typer.Context, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: null\nhost: ~\nport:\ntune: off\nserved-model-name: [a, b]\n")
    read_config(context, file)
    assert context.default_map == {"tune": "off", "served_model_name": ["a", "b"]}


@pytest.mark.parametrize("item", ["null", "~", "''"])
def test_a_list_of_keys_has_no_empty_ones(
    context: typer.Context, tmp_path: Path, item: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"api-key: [first, {item}]\n")
    with pytest.raises(typer.BadParameter, match="api_key must be"):
        read_config(context, file)


@pytest.mark.parametrize("name", ["tune_after", "tune_budget"])
@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_seconds_of_tuning_are_no_less_than_none(name: str, seconds: float) -> None:
    flag = name.replace("_", "-")
    with pytest.raises(SpecError, match=f"--{flag} must be seconds, 0 or more, not {seconds:g}"):
        ModelFlags(**{name: seconds}).check(None)


def test_a_budget_of_no_seconds_tunes_nothing() -> None:
    """A compile refuses it, so that each job would fail."""
    with pytest.raises(SpecError, match="--tune-budget 0 measures nothing"):
        ModelFlags(tune="idle", tune_budget=0.0).check(None)


def test_keys_of_a_file_may_be_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"first\n\n  \xff\xe9\n")
    keys = HttpFlags(api_key=["given"], api_key_file=tmp_path / "keys").settings().api_keys
    assert [os.fsencode(key) for key in keys] == [b"given", b"first", b"\xff\xe9"]


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_opens_no_server(key: str) -> None:
    with pytest.raises(SpecError, match=f"--api-key '{key}' is no key; give a text, or omit"):
        HttpFlags(api_key=["first", key]).settings()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--index", "/nowhere"), "/nowhere is not an index"),
        (("--workflow", "/nowhere.yaml"), "'/nowhere.yaml' is neither a file nor a workflow"),
    ],
)
@pytest.mark.parametrize("verb", [("serve", "--port", 0), ("run", "--workflow", "one-shot")])
def test_what_is_not_there_is_told_before_a_model_is_compiled(
    verb: tuple[object, ...],
    flags: tuple[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    name, *own = verb
    result = dovetail(name, LLAMA, *own, *flags)
    assert_one_sentence(result)
    assert said in result.err and not [*tmp_path.rglob("*.dove")]


def test_a_busy_port_is_told_of_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        result = dovetail("serve", tmp_path / "no model", "--port", number)
    assert_one_sentence(result)
    assert f"cannot listen on 127.0.0.1:{number}" in result.err
