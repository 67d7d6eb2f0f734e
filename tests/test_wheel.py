"""A wheel that carries kernels serves where there is no C compiler: every family, end to end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.codegen.shared import share_kernels
from dovetail.codegen.targets import host_target
from dovetail.compiler.rules.shared_kernels import rule_kernels
from dovetail.ir.shared_kernels import pack_libraries
from tests.encoders import MODERN, Jina, save_encoder
from tests.models import EXPERTS, FAMILIES, UNEVEN, UNGATED, save_model
from tests.repository import FOLDERS, ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

LARGEST = 300_000_000
"""Bytes that a plain installation may take: Dovetail and what it needs."""
BEFORE = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
"""Packages that an environment has before anything is installed."""
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}
ENCODERS = {
    "bert": {},
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "modernbert": MODERN,
    "gte": {"pad_token_id": 0, "type_vocab_size": 0},
}
"""Families of encoders, and how a small one is made."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with nothing but the wheel, what it needs and the kernels of this machine."""
    work = tmp_path_factory.mktemp("clean")
    source = work / "source"
    for folder in FOLDERS.values():
        ignored = shutil.ignore_patterns("__pycache__", "libraries")
        shutil.copytree(folder, source / folder.relative_to(ROOT), ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = host_target()
    share_kernels(target, rule_kernels(target), store=source / "ir/libraries")
    pack_libraries(source / "ir/libraries")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(work), str(source)], check=True, capture_output=True)
    (wheel,) = work.glob("*.whl")
    venv.create(work / "env", with_pip=True)
    install = [str(work / "env/bin/python"), "-m", "pip", "install", "-q"]
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    yield work
    shutil.rmtree(work / "env")


def disk_usage(folder: Path) -> int:
    """Return the bytes that a folder takes, as du does."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def environment(clean: Path) -> dict[str, str]:
    """Return variables without a compiler, a cache or anything else of this process."""
    kept = {name: os.environ[name] for name in ("DOVETAIL_TARGET",) if name in os.environ}
    home = {"HOME": str(clean), "DOVETAIL_CACHE": str(clean / "cache")}
    return {**kept, **home, "PATH": str(clean / "env/bin")}


def run(clean: Path, *arguments: object) -> str:
    command = [str(clean / "env/bin/dovetail"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=clean, env=environment(clean), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_plain_installation_is_small(clean: Path) -> None:
    """As it were, had the wheel the kernels of all its targets."""
    targets = re.search(r"^WHEEL_TARGETS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    (libraries,) = (clean / "env").glob("lib/*/site-packages/dovetail/ir/libraries")
    others = len(targets[1].split()) - 1
    (packages,) = (clean / "env").glob("lib/*/site-packages")
    taken = disk_usage(clean / "env") - sum(disk_usage(packages / name) for name in BEFORE)
    assert taken + others * disk_usage(libraries) <= LARGEST


@pytest.mark.parametrize("family", [*FAMILIES, *UNGATED, *EXPERTS, *UNEVEN])
def test_a_model_of_every_family_generates(clean: Path, tmp_path: Path, family: str) -> None:
    published = {"attn_logit_softcapping": 50.0} if family == "gemma2" else {}
    model = save_model(tmp_path / family, family, **published)
    assert len(run(clean, "run", model, "--prompt-ids", "5,6,7", "--max-tokens", 4).split()) >= 1


@pytest.mark.parametrize("family", (*ENCODERS, "jina"))
def test_an_encoder_of_every_family_embeds(clean: Path, tmp_path: Path, family: str) -> None:
    model, artifact = tmp_path / family, tmp_path / "e.dove"
    if family == "jina":
        Jina().save(model)
    else:
        save_encoder(model, family, **ENCODERS[family])
    run(clean, "compile", model, "-o", artifact)
    script = f"import dovetail\nwith dovetail.load({str(artifact)!r}) as app: "
    script += "print(app.embed([[5, 6, 7]]).shape)"
    done = subprocess.run(
        [str(clean / "env/bin/python"), "-P", "-c", script],
        capture_output=True,
        text=True,
        cwd=clean,
        env=environment(clean),
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("(1, "), done.stderr


def test_the_quickstart_ends_with_what_then_serves(clean: Path) -> None:
    text = run(clean, "quickstart")
    assert "by rules" in text
    lines = text.strip().splitlines()
    report = Path(lines[-1].rpartition(": ")[2])
    assert report.read_text().startswith("<!doctype html>")
    command = lines[-3].partition("port: dovetail ")[2].split()
    page = lines[-2].split()[-1]
    server = subprocess.Popen(
        [str(clean / "env/bin/dovetail"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=clean,
        env=environment(clean),
    )
    try:
        assert server.stdout is not None and "serving" in server.stdout.readline()
        assert b"<title>" in urllib.request.urlopen(page, timeout=60).read()
    finally:
        server.terminate()
        server.wait(60)
