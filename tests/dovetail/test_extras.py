"""What an optional package is needed for says how to install it."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Callable

import pytest

from dovetail.cli import bench_serve
from dovetail.compiler.tune import model as tune
from dovetail.errors import SpecError
from dovetail.ffi import Kernels
from dovetail.ir.errors import install
from dovetail.tiny_world import LLAMA
from tests.repository import ROOT, module_files

CALLED = re.compile(r"\binstall\(['\"](\w+)['\"]\)")


def test_extras_that_errors_name_are_ours() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra for file in module_files().values() for extra in CALLED.findall(file.read_text())
    }
    assert len(named) >= 6 and named <= known.keys()


LACKING: dict[str, tuple[str, Callable[[], object]]] = {
    "ffi": ("tvm_ffi", lambda: Kernels({})),
    "haystack": ("haystack", lambda: importlib.import_module("dovetail.import_haystack")),
}


@pytest.mark.parametrize("extra", LACKING)
def test_a_package_that_lacks_is_told_of_with_its_command(
    monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    package, use = LACKING[extra]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "dovetail.import_haystack", raising=False)
    with pytest.raises((SpecError, ImportError), match=re.escape(install(extra))):
        use()


def test_verbs_say_which_command_brings_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "can_fit", lambda: False)
    with pytest.raises(SpecError, match=re.escape(install("tune"))):
        tune.tune_model(LLAMA)
    monkeypatch.setattr(bench_serve, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=re.escape(install("bench"))):
        bench_serve._check_plot([1.0])
