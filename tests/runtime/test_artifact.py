"""Opening artifacts: every kind of damage is one ArtifactError that names file and remedy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.codegen.targets import TARGETS
from dovetail.ir.errors import ArtifactError, CapacityError, RequestError
from dovetail.runtime.app import load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.machine.isa import REQUIREMENTS, choose_target, supports
from dovetail.runtime.verify import verify_artifact
from dovetail.topology.hardware import read_hardware

MakeArtifact = Callable[..., Path]
Reseal = Callable[[Path], None]
HARDWARE = read_hardware()


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_sound_artifact_opens_and_verifies(make_artifact: MakeArtifact) -> None:
    path = make_artifact()
    artifact = open_artifact(path, HARDWARE, check_weights=True)
    assert artifact.target == "generic" and set(artifact.models) == {"llm"}
    report = verify_artifact(path)
    assert report.ok and report.faults == () and report.runs_here == ("generic",)
    assert report.files == 9


FILES = (
    "models/llm/model.json",
    "models/llm/schedules.json",
    "models/llm/tapes/forward.json",
    "models/llm/weights/chunks.json",
    "models/llm/weights/weights.bin",
    "kernels/generic/index.json",
    "kernels/generic/toy.so",
    "graph/serve.json",
    "manifest.json",
)


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "directory"])
def test_damaged_files_are_named(make_artifact: MakeArtifact, name: str, damage: str) -> None:
    path = make_artifact()
    file = path / name
    if damage == "missing":
        file.unlink()
    elif damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        os.truncate(file, file.stat().st_size // 2 if damage == "truncated" else 0)
    with pytest.raises(ArtifactError, match=Path(name).name) as error:
        open_artifact(path, HARDWARE)
    assert "dovetail" in str(error.value) and "\n" not in str(error.value)
    assert not verify_artifact(path).ok


@pytest.mark.parametrize("name", [f for f in FILES if f != "manifest.json"])
def test_a_flipped_byte_is_found(make_artifact: MakeArtifact, name: str) -> None:
    path = make_artifact()
    flip_a_byte(path / name)
    with pytest.raises(ArtifactError, match=Path(name).name):
        open_artifact(path, HARDWARE, check_weights=True)
    report = verify_artifact(path)
    assert not report.ok and Path(name).name in report.faults[0]


def test_weights_are_hashed_only_on_demand(make_artifact: MakeArtifact) -> None:
    path = make_artifact()
    flip_a_byte(path / "models/llm/weights/weights.bin")
    open_artifact(path, HARDWARE)
    with pytest.raises(ArtifactError, match="chunk 1"):
        load(path, check_weights=True)


def test_a_chunk_that_claims_to_be_huge_ends_with_the_file(
    make_artifact: MakeArtifact, reseal: Reseal
) -> None:
    path = make_artifact()
    data = (path / "models/llm/weights/weights.bin").read_bytes()
    one = {"chunk_bytes": 1 << 62, "sha256": [hashlib.sha256(data).hexdigest()]}
    edit_json(path / "models/llm/weights/chunks.json", lambda m: m.update(one))
    reseal(path)
    assert verify_artifact(path).ok
    flip_a_byte(path / "models/llm/weights/weights.bin")
    with pytest.raises(ArtifactError, match="chunk 0"):
        open_artifact(path, HARDWARE, check_weights=True)


def test_versions_and_paths(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    path = make_artifact()
    edit_json(path / "manifest.json", lambda m: m.update(format_major=1))
    with pytest.raises(ArtifactError, match=r"format 1 .*`dovetail compile MODEL -o"):
        open_artifact(path, HARDWARE)
    command = ["dovetail", "compile", "/my models/a", "-o", "/a.dove"]
    edit_json(path / "manifest.json", lambda m: m.update(format_major=3, command=command))
    with pytest.raises(ArtifactError, match=r"format 3 .*`dovetail compile '/my models/a' -o /a"):
        open_artifact(path, HARDWARE)
    with pytest.raises(ArtifactError, match="nothing does not exist; run"):
        open_artifact(tmp_path / "nothing", HARDWARE)
    with pytest.raises(ArtifactError, match="not an artifact directory"):
        open_artifact(path / "manifest.json", HARDWARE)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "x\\..\\y"])
def test_paths_out_of_the_artifact_are_refused(make_artifact: MakeArtifact, name: str) -> None:
    path = make_artifact()
    entry = {"bytes": 1, "sha256": None}
    edit_json(path / "manifest.json", lambda m: m["files"].update({name: entry}))  # type: ignore[attr-defined]
    with pytest.raises(ArtifactError, match="leads out"):
        open_artifact(path, HARDWARE)


def test_links_out_of_the_artifact_are_refused(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    path = make_artifact()
    file = path / "graph/serve.json"
    shutil.move(file, tmp_path / "outside.json")
    file.symlink_to(tmp_path / "outside.json")
    with pytest.raises(ArtifactError, match="link"):
        open_artifact(path, HARDWARE)


EDITS: dict[str, tuple[str, Callable[[dict[str, object]], object], str]] = {
    "weight outside": (
        "models/llm/model.json",
        lambda m: m["weights"][0].update(offset=9984, bytes=64),  # type: ignore[index]
        "outside",
    ),
    "unknown operator": (
        "models/llm/tapes/forward.json",
        lambda m: m["entries"][0].update(op="mystery"),  # type: ignore[index]
        "mystery",
    ),
    "unknown argument": (
        "models/llm/tapes/forward.json",
        lambda m: m["entries"][0].update(m="mystery"),  # type: ignore[index]
        "mystery",
    ),
    "unknown weight": (
        "models/llm/tapes/forward.json",
        lambda m: m["entries"][0]["slots"].__setitem__(0, {"type": "weight", "name": "no"}),  # type: ignore[index]
        "weight 'no'",
    ),
    "unknown buffer": (
        "models/llm/tapes/forward.json",
        lambda m: m["entries"][0]["slots"].__setitem__(0, {"type": "buffer", "name": "no"}),  # type: ignore[index]
        "buffer 'no'",
    ),
    "layer outside": (
        "models/llm/tapes/forward.json",
        lambda m: m["entries"][0]["slots"][3].update(layer=7),  # type: ignore[index]
        "layer 7",
    ),
    "operand missing": (
        "models/llm/tapes/forward.json",
        lambda m: m["entries"][0]["slots"].pop(),  # type: ignore[index]
        "operands",
    ),
    "kernel missing": (
        "models/llm/schedules.json",
        lambda m: m["tables"][0]["rows"][0].update(kernel="none"),  # type: ignore[index]
        "'none'",
    ),
    "rows do not cover": (
        "models/llm/schedules.json",
        lambda m: m["tables"][0]["rows"][0].update(m_lo=4),  # type: ignore[index]
        "cover",
    ),
    "weight too short": (
        "models/llm/model.json",
        lambda m: m["weights"][0].update(n=9),  # type: ignore[index]
        "too few bytes",
    ),
    "weight of another model": (
        "models/llm/model.json",
        lambda m: m["weights"][0].update(name="final_norm"),  # type: ignore[index]
        "another shape",
    ),
    "unknown dtype": (
        "models/llm/model.json",
        lambda m: m["weights"][0].update(dtype="f7"),  # type: ignore[index]
        "compile the model again by",
    ),
    "short schedule": (
        "models/llm/schedules.json",
        lambda m: m["tables"][0]["rows"][0].update(schedule=[0]),  # type: ignore[index]
        "1 values",
    ),
    "other kernel abi": ("kernels/generic/index.json", lambda m: m.update(abi=10), "ABI 10"),
    "listed kernel absent": (
        "kernels/generic/index.json",
        lambda m: m["kernels"][0].update(name="ghost"),  # type: ignore[index]
        "ghost",
    ),
    "library not listed": (
        "kernels/generic/index.json",
        lambda m: m.update(library="other.so"),
        "other.so",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_parts_that_do_not_fit_are_refused(
    make_artifact: MakeArtifact, reseal: Reseal, case: str
) -> None:
    name, change, words = EDITS[case]
    path = make_artifact()
    edit_json(path / name, change)
    reseal(path)
    with pytest.raises(ArtifactError, match=words):
        load(path)
    report = verify_artifact(path)
    assert not report.ok and words in report.faults[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("bytes_", [0, 7])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(
    make_artifact: MakeArtifact, name: str, bytes_: int
) -> None:
    path = make_artifact()
    (path / name).unlink()
    os.mkfifo(path / name)
    if name != "manifest.json":
        entry = {"bytes": bytes_, "sha256": None if name.endswith("weights.bin") else "0" * 64}
        edit_json(path / "manifest.json", lambda m: m["files"].update({name: entry}))  # type: ignore[attr-defined]
    with pytest.raises(ArtifactError, match=Path(name).name + ": cannot be read.*regular"):
        load(path)
    report = verify_artifact(path)
    assert not report.ok and "not a regular file" in report.faults[0]


def replaced(phase: str, **fields: object) -> Callable[[dict[str, Any]], object]:
    """Return what places the model's first process otherwise in a phase."""

    def edit(graph: dict[str, Any]) -> None:
        (node,) = (n for n in graph["nodes"] if n["name"] == f"llm/{phase}/0")
        node["place"].update(fields)

    return edit


COUNTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no process": lambda g: g.update(nodes=[], edges=[]),
    "a process below 0": replaced("decode", process=-1),
    "a process without others": replaced("decode", process=7),
    "processes without end": replaced("decode", process=1 << 40),
    "no thread": replaced("decode", threads=0),
    "threads without end": replaced("prefill", threads=1 << 40),
    "a CPU below 0": replaced("prefill", cpus=[-1, 0]),
    "fewer CPUs than threads": replaced("prefill", cpus=[0]),
    "a node below 0": replaced("decode", node=-1),
    "blocks below 0": replaced("decode", kv_blocks=-1),
    "a spin below 0": replaced("decode", spin=-1),
    "a spin without end": replaced("decode", spin=1 << 62),
    "a threshold below 0": lambda g: g["edges"][0].update(tokens=-1),
    "an edge to nowhere": lambda g: g["edges"][0].update(target="x"),
}


@pytest.mark.parametrize("case", COUNTS)
def test_counts_that_no_machine_has_are_refused(
    make_artifact: MakeArtifact, reseal: Reseal, case: str
) -> None:
    path = make_artifact()
    edit_json(path / "graph/serve.json", COUNTS[case])
    reseal(path)
    for read in (load, lambda p: open_artifact(p, HARDWARE)):
        with pytest.raises(ArtifactError, match=r"serve\.json") as error:
            read(path)
        assert "\n" not in str(error.value)
    report = verify_artifact(path)
    assert not report.ok and "serve.json" in report.faults[0]


def test_targets_of_the_compiler_are_known_here() -> None:
    assert set(TARGETS) == set(REQUIREMENTS)
    for name, target in TARGETS.items():
        assert REQUIREMENTS[name].flags == target.cpu_features
        assert REQUIREMENTS[name].slow == target.slow_flags
        if faster := REQUIREMENTS[name].faster:
            assert REQUIREMENTS[faster].flags <= REQUIREMENTS[name].flags


def test_the_best_target_that_runs_is_taken() -> None:
    from msgspec.structs import replace

    x86 = ("generic", "x86-64-avx2", "x86-64-avx512")
    wide = REQUIREMENTS["x86-64-avx512"].flags
    tiles = replace(HARDWARE, arch="x86_64", isa_flags=tuple(REQUIREMENTS["x86-64-amx"].flags))
    cases = (
        (tiles, ("x86-64-amx", *x86), "x86-64-amx"),
        (tiles, x86, "x86-64-avx512"),
        (replace(HARDWARE, arch="x86_64", isa_flags=tuple(wide)), x86, "x86-64-avx512"),
        (replace(HARDWARE, arch="x86_64", isa_flags=("avx2", "fma", "f16c")), x86, "x86-64-avx2"),
        (replace(HARDWARE, arch="x86_64", isa_flags=("sse2",)), x86, "generic"),
        (
            replace(HARDWARE, arch="aarch64", isa_flags=("asimd",)),
            ("aarch64-neon",),
            "aarch64-neon",
        ),
    )
    for hardware, targets, expected in cases:
        assert choose_target(Path("a.dove"), targets, hardware) == expected
        assert supports(expected, hardware)
    with pytest.raises(ArtifactError, match=r"kernels.*x86-64-avx512.*dovetail compile"):
        choose_target(Path("a.dove"), ("x86-64-avx512",), cases[3][0])


def test_a_target_that_a_cpu_runs_slowly_is_taken_unless_the_faster_one_is_there() -> None:
    from msgspec.structs import replace

    both, flags = (
        ("x86-64-avx512bf16", "x86-64-avx512vnni"),
        REQUIREMENTS["x86-64-avx512bf16"].flags,
    )
    zen = replace(HARDWARE, arch="x86_64", isa_flags=tuple(flags))
    rapids = replace(zen, isa_flags=(*flags, "avx512_fp16"))
    assert choose_target(Path("a.dove"), both, zen) == "x86-64-avx512bf16"
    lesser = ("x86-64-avx2", "generic")
    assert choose_target(Path("a.dove"), (*lesser, *both), rapids) == "x86-64-avx512vnni"
    assert choose_target(Path("a.dove"), (*lesser, both[0]), rapids) == "x86-64-avx512bf16"


@pytest.mark.parametrize("options", [{"threads": 0}, {"kv_blocks": -1}, {"memory": 0}])
def test_load_options_are_checked(make_artifact: MakeArtifact, options: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        load(make_artifact(), **options)  # type: ignore[arg-type]


def test_a_pool_larger_than_memory_is_refused(make_artifact: MakeArtifact) -> None:
    with pytest.raises(
        CapacityError, match=r"beside weights and activations; load with at most \d+ kv"
    ):
        load(make_artifact(), kv_blocks=1 << 48)
