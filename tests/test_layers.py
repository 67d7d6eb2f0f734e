"""Imports go only downwards, in no circle; the runtime stays free of the compiler and torch.

And no folder grows unnoticed.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest

from tests.repository import FOLDERS, ROOT, imported_names, module_files

MAY_IMPORT = {
    "dovetail": {"compiler", "runtime", "codegen", "topology", "ir", "tiny_world"},
    "tiny_world": set(),
    "compiler": {"codegen", "topology", "runtime", "ir"},
    "codegen": {"ir"},
    "runtime": {"topology", "ir"},
    "topology": {"ir"},
    "ir": set(),
}
HEAVY = {"torch", "transformers", "faiss", "safetensors", "tvm", "tvm_ffi", "ray", "sklearn"}
ALLOWED = {
    "dovetail.compiler.search.fit_cost_model": {"sklearn"},
    "dovetail.ffi": {"tvm_ffi"},
    "dovetail.runtime.index.build": {"faiss"},
    "dovetail.runtime.index.ivf": {"faiss"},
    "dovetail.runtime.index.faiss_lists": {"faiss"},
    "dovetail.compiler.tune.ray_jobs": {"ray"},
    "dovetail.runtime.group.ray_ranks": {"ray"},
    "dovetail.tiny_world.encoder": {"torch", "transformers"},
    "dovetail.tiny_world.train_encoder": {"safetensors", "torch", "transformers"},
    "dovetail.tiny_world.train_llama": {"safetensors", "torch", "transformers"},
}
TORCH_ROOM = "dovetail.runtime.accel."
"""The only part of the runtime whose modules import torch."""
ROOMS = {
    "compiler": (
        "files",
        "families",
        "formats",
        "models",
        "tape",
        "rules",
        "measure",
        "search",
        "plan",
        "write",
        "request",
        "stored",
        "encoder_pipeline",
        "reopen",
        "input_powers",
        "pipeline",
        "tune",
    ),
    "runtime": (
        "machine",
        "schedule",
        "timeline",
        "child",
        "text",
        "artifact",
        "native",
        "group",
        "engine",
        "verify",
        "index",
        "embed",
        "accel",
        "hosting",
        "retrieval",
        "flows",
        "app",
        "server",
        "sim",
    ),
}
"""Of a folder: its rooms and flat files, each of which imports only what stands before it."""
CORE = ("native", "schedule", "engine", "accel", "child", "group")
"""Rooms that are thin: who reads how a token is made reads these."""
LINES = {
    "dovetail": 7_820,
    "compiler": 23_290,
    "codegen": 19_570,
    "topology": 4_030,
    "ir": 11_420,
    "runtime": 42_700,
    "runtime/machine": 1_250,
    "runtime/schedule": 4_000,
    "runtime/child": 940,
    "runtime/text": 4_470,
    "runtime/native": 2_800,
    "runtime/group": 510,
    "runtime/engine": 1_970,
    "runtime/index": 1_590,
    "runtime/embed": 2_920,
    "runtime/accel": 4_980,
    "runtime/hosting": 1_980,
    "runtime/retrieval": 1_720,
    "runtime/flows": 5_890,
    "runtime/server": 5_290,
    "runtime/sim": 1_090,
}
"""Most lines of source in each folder and room: what grows beyond has to say why, here."""
SOURCE = (".py", ".dk", ".j2", ".c", ".h", ".cuh", ".lark")
SIMULATORS = "dovetail.runtime.sim"
FACE = "dovetail"
MODULES = module_files()


def layer(module: str) -> str:
    """Return a module's folder: `dovetail.ir.node` -> `ir`, `dovetail.cli.run` -> `dovetail`."""
    parts = module.split(".")
    return parts[1] if f"dovetail.{parts[1]}" in FOLDERS else "dovetail"


def target(name: str) -> str | None:
    """Return the module of ours that an imported name is, or lies in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def edges(module: str) -> set[str]:
    lazy = module == FACE  # its imports for type checkers are what it loads when it is asked
    imports = imported_names(MODULES[module])
    found = {target(name) for name, _, typing in imports if not (lazy and typing)}
    return {f for f in found if f is not None} - {module}


def wrong_imports(refused: Callable[[str, str], bool], modules: Iterable[str]) -> list[str]:
    """Return where a module imports a name that is refused to it."""
    return [
        f"{MODULES[module]}:{line}: {name}"
        for module in modules
        for name, line, _ in imported_names(MODULES[module])
        if refused(module, name)
    ]


def test_imports_go_only_downwards() -> None:
    def refused(module: str, name: str) -> bool:
        if not name.startswith("dovetail."):
            return False
        here, there = layer(module), layer(name + ".x")
        return there != here and there not in MAY_IMPORT[here]

    assert not wrong_imports(refused, set(MODULES) - set(FOLDERS))


def room(module: str) -> tuple[str, str] | None:
    """Return a module's folder and room: `dovetail.runtime.flows.control.x` -> runtime, flows."""
    parts = module.split(".")
    if len(parts) < 3 or parts[1] not in ROOMS:
        return None
    return parts[1], "app" if parts[2].startswith("app_") else parts[2]


def test_rooms_import_only_lower_rooms() -> None:
    """Also under TYPE_CHECKING: who names a type depends on it."""

    def refused(module: str, name: str) -> bool:
        here, there = room(module), room(name)
        if here is None or there is None or here == there or here[0] != there[0]:
            return False
        rooms = ROOMS[here[0]]
        return rooms.index(there[1]) >= rooms.index(here[1])

    assert not wrong_imports(refused, MODULES)


def test_only_what_answers_by_simulation_imports_the_simulators() -> None:
    others = (m for m in MODULES if not m.startswith((SIMULATORS, "dovetail.cli.bench")))
    assert not wrong_imports(lambda _, name: name.startswith(SIMULATORS), others)


def test_no_module_takes_part_in_a_circle() -> None:
    graph = {module: edges(module) for module in MODULES}
    while leaves := {m for m, uses in graph.items() if not uses}:
        graph = {m: uses - leaves for m, uses in graph.items() if m not in leaves}
    assert not graph, f"import circle among {sorted(graph)}"


def test_heavy_packages_stay_outside() -> None:
    def refused(module: str, name: str) -> bool:
        torch = {"torch"} if module.startswith(TORCH_ROOM) else set[str]()
        return name.split(".", maxsplit=1)[0] in HEAVY - ALLOWED.get(module, set()) - torch

    assert not wrong_imports(refused, MODULES)


def test_files_stay_short_and_say_what_they_are() -> None:
    for path in MODULES.values():
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def count_lines(folder: str) -> int:
    files = (f for f in (ROOT / folder).rglob("*") if f.suffix in SOURCE)
    return sum(len(f.read_text().splitlines()) for f in files)


@pytest.mark.parametrize("folder", LINES)
def test_no_folder_grows_unnoticed(folder: str) -> None:
    """Nor does a limit stand far above what there is."""
    lines = count_lines(folder)
    assert 0.95 * LINES[folder] - 50 <= lines <= LINES[folder], lines


def test_the_core_is_thin() -> None:
    """The aim is 12,000 lines: attention's tables, recorded steps, masks, drafts, the model
    that makes some of these and rows of adapters came on top. So did experts and recurrent states.
    """
    assert {
        f"runtime/{room}" for room in ROOMS["runtime"] if (ROOT / "runtime" / room).is_dir()
    } < set(LINES)
    assert sum(count_lines(f"runtime/{room}") for room in CORE) <= 15_170


def test_no_two_classes_of_the_runtime_or_the_command_line_look_alike() -> None:
    """Names that differ only by an underscore do."""
    homes = defaultdict(list)
    for module, path in MODULES.items():
        if module != FACE and layer(module) in ("dovetail", "runtime"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes[node.name.strip("_")].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
