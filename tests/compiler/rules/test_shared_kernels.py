"""Kernels that models share: found without a compiler, built anew where they are not whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import msgspec
import pytest

import dovetail
from dovetail.codegen import shared
from dovetail.codegen.catalog import FIXED_HEAD_DIMS, HeadShape, kernel_request
from dovetail.codegen.library import find_kernel, load_kernel_module
from dovetail.codegen.lower.pipeline import bind_tunables
from dovetail.codegen.shared import share_kernels
from dovetail.codegen.targets import TARGETS, get_target, host_target
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.rules.shared_kernels import COMMON_HEADS, main, rule_kernels, target_kernels
from dovetail.compiler.rules.tables import default_tables
from dovetail.errors import ArtifactError, MissingKernelsError, ToolchainError
from dovetail.ir.formats import FORMATS
from dovetail.ir.shared_kernels import SharedLibrary, cached_store, read_libraries
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.verify import verify_artifact
from dovetail.tiny_world import LLAMA
from dovetail.topology.hardware import read_hardware
from tests.caches import link_cache
from tests.compiler.rules.test_tables import SPEC, plan
from tests.models import save_model

TARGET = get_target("generic")
NORM, GATHER = (kernel_request(family, TARGET) for family in ("rmsnorm", "gather_rows"))
NO_COMPILER = "/bin/false"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The cache and artifact of a first compile."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOVETAIL_CACHE", str(link_cache(folder, kernels=False)))
        compile_model(LLAMA, output=folder / "a.dove", effort="none")
    return folder


@pytest.fixture
def machine(compiled, tmp_path, monkeypatch):
    """Copies of both, which a test may change; its store, and no compiler."""
    cache = link_cache(tmp_path, kernels=False)
    shutil.copytree(compiled / "cache/kernels", cache / "kernels")
    shutil.copytree(compiled / "a.dove", tmp_path / "a.dove")
    monkeypatch.setenv("DOVETAIL_CACHE", str(cache))
    monkeypatch.setenv("DOVETAIL_CC", NO_COMPILER)
    return tmp_path


def answer(path):
    with dovetail.load(path, threads=1) as app:
        return app.generate(["One"], max_tokens=4)[0].token_ids


# ---- artifacts ----


def test_an_artifact_of_rules_carries_no_library_and_may_move(machine):
    (target,) = (machine / "a.dove/kernels").iterdir()
    assert [p.name for p in target.iterdir()] == ["index.json"]
    first = answer(machine / "a.dove")
    (machine / "a.dove").rename(machine / "moved.dove")
    assert verify_artifact(machine / "moved.dove").ok
    assert answer(machine / "moved.dove") == first


def test_a_second_model_needs_no_compiler(machine):
    sizes = {"intermediate_size": 160, "head_dim": 32, "tie_word_embeddings": True}
    other = save_model(machine / "other", "llama", **sizes)
    (part,) = open_artifact(machine / "a.dove", read_hardware()).models.values()
    report = compile_model(
        other,
        output=machine / "b.dove",
        effort="none",
        weight_dtype=part.file.spec.weight_dtype,
        kv_dtype=part.file.spec.kv_dtype,
    )
    assert report.kernels == len(open_artifact(machine / "b.dove", read_hardware()).shared)
    with dovetail.load(machine / "b.dove") as app:
        assert len(app.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)[0].token_ids) == 2


def test_without_kernels_and_compiler_there_is_one_sentence(machine):
    shutil.rmtree(cached_store())
    with pytest.raises(MissingKernelsError, match=r"run `dovetail compile .*a.dove -o .*a.dove`"):
        open_artifact(machine / "a.dove", read_hardware())
    (fault,) = verify_artifact(machine / "a.dove").faults
    assert "no shared library of this machine has" in fault
    with pytest.raises(ToolchainError):
        dovetail.load(machine / "a.dove")


@pytest.mark.parametrize("damage", ["library", "description", "cut"])
def test_a_damaged_library_is_as_good_as_none(machine, damage):
    (path, _), *_ = read_libraries(host_target().name)
    if damage == "library":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.with_suffix(".json").write_bytes(b"{" if damage == "cut" else b"[]")
    with pytest.raises(ArtifactError, match="no shared library"):
        open_artifact(machine / "a.dove", read_hardware())


def test_load_builds_what_is_missing(machine, monkeypatch, capfd):
    first = answer(machine / "a.dove")
    shutil.rmtree(cached_store())
    monkeypatch.delenv("DOVETAIL_CC")
    assert answer(machine / "a.dove") == first
    assert "once on this machine" in capfd.readouterr().err
    assert answer(machine / "a.dove") == first
    assert capfd.readouterr().err == ""


def test_an_artifact_of_other_kernels_is_compiled_anew(machine, monkeypatch):
    """Those that the artifact wants cannot be made from the texts of this version."""
    for path in cached_store().rglob("*.json"):
        library = msgspec.json.decode(path.read_bytes(), type=SharedLibrary)
        kernels = tuple(msgspec.structs.replace(k, shared="0") for k in library.index.kernels)
        index = msgspec.structs.replace(library.index, kernels=kernels)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(library, index=index)))
    with pytest.raises(MissingKernelsError):
        dovetail.load(machine / "a.dove")
    compile_model(machine / "a.dove", output=machine / "a.dove", effort="none")
    assert verify_artifact(machine / "a.dove").ok


def test_what_another_machine_runs_is_in_the_artifact(cache, tmp_path):
    here = target_kernels(TARGET, (NORM,), None, here=True)
    there = target_kernels(TARGET, (NORM,), None, here=False)
    assert here.own is None
    assert here.index.kernels[0].shared
    assert there.own is not None
    assert there.index.kernels[0].shared == ""


def test_an_artifact_carries_what_the_rules_do_not_name(cache):
    own = kernel_request("ivf_scan", TARGET, "l2")
    found = target_kernels(TARGET, (NORM, own), None, here=True)
    assert found.own is not None
    assert {k.name: bool(k.shared) for k in found.index.kernels} == {
        own.name: False,
        "rmsnorm": True,
    }


# ---- the store ----


def test_a_library_grows_by_what_is_missing(cache):
    (norm,) = share_kernels(TARGET, [NORM])
    both = share_kernels(TARGET, [GATHER, NORM])
    assert both[1] == norm
    libraries = [library for _, library in read_libraries(TARGET.name)]
    names = [[k.name for k in library.index.kernels] for library in libraries]
    assert sorted(names) == [["gather_rows"], ["rmsnorm"]]


def test_who_waits_for_kernels_hears_how_many_are_made(cache):
    told = []
    share_kernels(TARGET, [GATHER, NORM], advance=lambda done, total: told.append(done / total))
    assert told[0] < 0.5 < told[-2] < told[-1] == 1
    assert told == sorted(told)


def test_a_changed_text_gives_a_new_library(cache, monkeypatch):
    (before,) = share_kernels(TARGET, [NORM])
    monkeypatch.setattr(shared, "generator_digest", lambda: "changed")
    share_kernels(TARGET, [NORM])
    assert len(list(read_libraries(TARGET.name))) == 2
    assert before.shared


def test_killed_while_building_leaves_nothing(cache, tmp_path):
    started, slow = tmp_path / "started", tmp_path / "cc"
    slow.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*--version*|*-dumpmachine*|*-fsyntax-only*) exec gcc "$@";;\n'
        f"esac\ntouch {started}\nexec sleep 60\n"
    )
    slow.chmod(0o755)
    code = (
        "from dovetail.codegen.shared import share_kernels as s;"
        "from dovetail.codegen.targets import get_target as t;"
        "from dovetail.codegen.catalog import kernel_request as k;"
        "g = t('generic'); s(g, [k('rmsnorm', g)])"
    )
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "DOVETAIL_CC": str(slow)},
        start_new_session=True,
    )
    while not started.exists():
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert [p.suffix for p in cached_store().rglob("*") if p.is_file()] == [".lock"]
    assert share_kernels(TARGET, [NORM])[0].shared


def test_a_store_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ToolchainError, match="DOVETAIL_CACHE"):
        share_kernels(TARGET, [NORM])


# ---- the list ----


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_list_names_each_kernel_once(target):
    names = [request.name for request in rule_kernels(target)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_all_of_the_list_can_be_built(target):
    for request in rule_kernels(target):
        function = find_kernel(load_kernel_module(request.module), request.kernel)
        assert bind_tunables(function, request.binding, target), request.name


def test_common_heads_are_unrolled():
    assert COMMON_HEADS.keys() <= set(FIXED_HEAD_DIMS)
    avx2 = get_target("x86-64-avx2")
    request = kernel_request("decode_attention", avx2, "f32", HeadShape(64, 3))
    assert request.name == "decode_attention_f32_64x3"
    assert request in rule_kernels(avx2)


def test_a_package_carries_the_libraries_of_its_targets(cache, tmp_path, monkeypatch):
    """What `make wheel` runs, with two kernels; then no compiler is needed."""
    from dovetail.compiler.rules import shared_kernels as listing
    from dovetail.ir import shared_kernels as stores

    for module in (listing, stores):
        monkeypatch.setattr(module, "BUNDLED", tmp_path / "libraries")
    monkeypatch.setattr(listing, "rule_kernels", lambda _: (NORM, GATHER))
    main(["--package", "generic"])
    kinds = {"".join(path.suffixes) for path in (tmp_path / "libraries/generic").iterdir()}
    assert kinds == {".json", ".so.xz"}
    monkeypatch.setenv("DOVETAIL_CC", NO_COMPILER)
    for _ in range(2):  # a damaged copy in the cache is made anew
        assert all(kernel.shared for kernel in share_kernels(TARGET, [GATHER, NORM]))
        ((path, _),) = read_libraries(TARGET.name)
        assert path.parent == cached_store() / TARGET.name
        path.write_bytes(b"damaged")


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_list_has_all_that_rules_name_for_a_decoder(target, dtype):
    changes = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "weight_dtype": dtype}
    spec = msgspec.structs.replace(SPEC, **changes)
    tables = default_tables(spec, target, [plan(2, 1)], read_hardware())
    named = {row.kernel for table in tables for row in table.rows}
    named |= {row.reduce_kernel for t in tables for row in t.rows if row.reduce_kernel}
    assert named <= {request.name for request in rule_kernels(target)}
