"""What pyproject.toml lists is what lies on disk, and a built wheel holds all of it and imports."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.repository import FOLDERS, ROOT, module_files

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]
BUILT = "libraries/*/*"
SKIPPED = {"__pycache__"}


def data_files() -> dict[str, Path]:
    """Map the wheel path of every file in the packages that is no Python source to the file."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".py" and not SKIPPED & set(path.parts):
                relative = path.relative_to(folder).as_posix()
                found[f"{package.replace('.', '/')}/{relative}"] = path
    return found


def test_every_package_on_disk_is_listed() -> None:
    on_disk = {name for name, path in module_files().items() if path.name == "__init__.py"}
    assert set(SETUPTOOLS["packages"]) == on_disk
    assert SETUPTOOLS["packages"] == sorted(SETUPTOOLS["packages"])


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in module_files().values()}
    assert [f for f in folders if not (f / "__init__.py").is_file()] == []


def test_package_data_rules_match_files_and_miss_none() -> None:
    matched = set()
    for package, patterns in SETUPTOOLS["package-data"].items():
        prefix = package.replace(".", "/")
        for pattern in patterns:
            hits = {f for f in data_files() if fnmatch.fnmatch(f, f"{prefix}/{pattern}")}
            made = pattern == BUILT  # `make wheel` puts them there
            assert hits or made, f"{package}: {pattern} matches no file"
            matched |= hits
    assert matched == set(data_files())


def test_typecheck_links_show_the_real_folders() -> None:
    links = ROOT / "typecheck/dovetail"
    seen = {p.name: p.resolve() for p in links.iterdir() if p.name != "__pycache__"}
    face = {p.name: p for p in FOLDERS["dovetail"].iterdir() if p.suffix in ("", ".py")}
    rest = {f.name: f for name, f in FOLDERS.items() if name != "dovetail"}
    expected = {n: p for n, p in (face | rest).items() if n != "__pycache__"}
    assert seen == expected


def test_constraints_pin_every_dependency() -> None:
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = CONFIG["project"]["optional-dependencies"]
    wanted = [
        *CONFIG["project"]["dependencies"],
        *(w for name in ("bench", "dev", "docs", "tune", "zig") for w in extras[name]),
    ]
    names = {w.split(">")[0].split("<")[0].lower().replace("_", "-") for w in wanted}
    assert names <= pins, names - pins


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the sources, without the network."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for path in (
        *(ROOT / n for n in ("pyproject.toml", "README.md", "LICENSE")),
        *FOLDERS.values(),
    ):
        link = source / path.relative_to(ROOT)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path)
    pytest.importorskip("setuptools", minversion="77")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--no-index", "--wheel-dir", str(work), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = work.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for module, path in module_files().items():
        tail = "/__init__.py" if path.name == "__init__.py" else ".py"
        assert module.replace(".", "/") + tail in names
    assert set(data_files()) <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_module_imports_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    zipfile.ZipFile(wheel).extractall(tmp_path)  # as pip does; tests/test_wheel.py installs one
    names = sorted(module_files())
    script = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"modules = [importlib.import_module(n) for n in {names!r}]\n"
        f"outside = [m.__file__ for m in modules if not m.__file__.startswith({str(tmp_path)!r})]\n"
        "assert not outside, outside\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_set_up_takes_packages_from_the_configured_index_alone() -> None:
    for name in ("Makefile", ".ci/run", "pyproject.toml", "constraints.txt"):
        text = (ROOT / name).read_text()
        assert "://" not in text and "index-url" not in text, name
