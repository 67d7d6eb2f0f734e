"""The whole compile: what an artifact holds, and that nothing is left where it fails."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import msgspec
import pytest

from dovetail.codegen.catalog import device_kernels
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.pipeline import compile_artifact, compile_model
from dovetail.compiler.request import CompileRequest, choose_targets
from dovetail.compiler.write.report import STEPS
from dovetail.ir.artifact import KernelIndex, Manifest
from dovetail.ir.errors import ArtifactError, SpecError, ToolchainError
from dovetail.ir.graph import GraphFile, make_graph
from dovetail.ir.model import ModelFile
from dovetail.ir.place import read_plan
from dovetail.ir.schedule import ScheduleFile
from dovetail.ir.tape import Tape
from dovetail.ir.tuning import OK, TIMEOUT, decode_record
from dovetail.runtime.artifact import device_module, open_artifact
from dovetail.topology.hardware import read_hardware
from tests.caches import link_cache
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.compiler.virtual import VirtualMeter, use_virtual_meters
from tests.models import save_model

TOKENIZER = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_model(tmp_path_factory.mktemp("pipeline") / "model", "llama", attention_bias=True)
    (path / "tokenizer.json").write_text(TOKENIZER)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "chat_template.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    """A compiled artifact, its report, and the progress that was reported."""
    path = tmp_path_factory.mktemp("artifact") / "app.dove"
    seen = []
    report = compile_model(
        model, output=path, effort="none", progress=lambda *event: seen.append(event)
    )
    return path, report, seen


def read(path, kind):
    return msgspec.json.decode(path.read_bytes(), type=kind)


def test_the_runtime_opens_it(artifact):
    path, report, _ = artifact
    opened = open_artifact(report, read_hardware(), check_weights=True)
    assert opened.manifest.targets == report.targets
    part = opened.models["llm"]
    assert part.tapes.keys() == {"forward", "sample"}
    assert part.tokenizer == path / "models/llm/tokenizer.json"


def test_what_it_holds(artifact):
    path, report, _ = artifact
    manifest = read(path / "manifest.json", Manifest)
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert manifest.files.keys() == found - {"manifest.json"}
    (target,) = manifest.targets
    index = read(path / f"kernels/{target}/index.json", KernelIndex)
    assert all(kernel.shared for kernel in index.kernels)
    assert {f for f in found if f.startswith("kernels/")} == {f"kernels/{target}/index.json"}
    model = read(path / "models/llm/model.json", ModelFile)
    assert (model.name, model.tokenizer) == ("llm", "tokenizer.json")
    assert (path / "models/llm/chat_template.jinja").read_text() == "{{ messages }}"
    assert (path / "models/llm/chat_template.json").read_text() == "{}"
    assert model.generation["eos_token_id"] == 2
    plan = read_plan(make_graph(read(path / "graph/serve.json", GraphFile)), "llm")
    assert plan.decode.threads == len(plan.decode.cpus) == report.threads
    assert report.weight_bytes == manifest.files["models/llm/weights/weights.bin"].bytes
    assert report.weight_dtype in report.notes[0] and "(--weight-dtype auto)" in report.notes[0]


def test_every_entry_finds_a_kernel_with_its_slots(artifact):
    path, _, _ = artifact
    (target,) = read(path / "manifest.json", Manifest).targets
    index = read(path / f"kernels/{target}/index.json", KernelIndex)
    kernels = {kernel.name: kernel for kernel in index.kernels}
    tables = {t.op: t for t in read(path / "models/llm/schedules.json", ScheduleFile).tables}
    for name in ("forward", "sample"):
        for entry in read(path / f"models/llm/tapes/{name}.json", Tape).entries:
            for row in tables[entry.op].rows:
                params = [p for p in kernels[row.kernel].params if p.kind == "slot"]
                assert len(params) == len(entry.slots), (entry.op, row.kernel)


def test_progress_names_every_step_in_order(artifact):
    _, report, seen = artifact
    assert list(dict.fromkeys(step for step, _, _ in seen)) == list(STEPS)
    assert report.seconds.keys() == set(STEPS)
    assert all(0 <= done <= total for _, done, total in seen)


def test_compiling_again_replaces_and_agrees(artifact, model, tmp_path):
    path, _, _ = artifact
    again = tmp_path / "again.dove"
    for _ in range(2):
        compile_artifact(CompileRequest(model=model, output=again, effort="none"))
    first, second = (read(p / "manifest.json", Manifest) for p in (path, again))
    differing = {name for name in first.files if first.files[name] != second.files.get(name)}
    assert differing <= {"hardware.json"}  # a virtual machine's memory may change meanwhile
    assert first.files.keys() == second.files.keys()
    assert first.model_fingerprint == second.model_fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["again.dove"]


@pytest.mark.parametrize(
    "targets",
    [
        ("x86-64-avx512", "aarch64-neon", "generic"),
        pytest.param(tuple(FLOAT_TARGETS), marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_several_targets_side_by_side(model, tmp_path, targets):
    """Every kernel of a model compiles for every target, also those that this CPU does not run."""
    path = tmp_path / "a.dove"
    report = compile_model(model, output=path, effort="none", targets=targets, threads=1)
    assert report.targets == targets
    assert {p.name for p in (path / "kernels").iterdir()} == set(report.targets)
    tables = read(path / "models/llm/schedules.json", ScheduleFile).tables
    assert {t.target for t in tables} == set(report.targets)
    assert {t.threads for t in tables} == {1}


@pytest.mark.long  # nvcc takes its time
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed (CUDA toolkit)")
def test_a_device_target_adds_its_module(model, tmp_path):
    path = tmp_path / "a.dove"
    report = compile_model(model, output=path, effort="none", targets=("cuda", "generic"))
    assert report.targets == ("generic", "cuda")
    opened = open_artifact(path, read_hardware())
    assert opened.target == "generic"
    module, index = device_module(opened)
    assert b"dt_cuda_gemm_skinny_f32_f32" in module.read_bytes()
    assert {k.name for k in index.kernels} == {r.name for r in device_kernels(())}
    assert all(k.warps > 0 for k in index.kernels)
    assert (module.parent / index.source).read_text().count("DT_ENTRY(") > len(index.kernels)


@pytest.mark.long  # nvcc takes its time
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed (CUDA toolkit)")
def test_a_device_module_has_products_of_the_formats_of_all_models(model, tmp_path):
    path = tmp_path / "a.dove"
    options = {"effort": "none", "targets": ("cuda", "generic")}
    compile_model(model, output=path, weight_dtype="int4", **options)
    _, index = device_module(open_artifact(path, read_hardware()))
    assert {k.name for k in index.kernels} >= {r.name for r in device_kernels(["q4_32"])}


def test_most_artifacts_have_no_device_kernels(artifact):
    assert device_module(open_artifact(artifact[0], read_hardware())) is None


def test_schedules_are_for_cpus():
    with pytest.raises(SpecError, match="schedules are for CPUs; cuda is not a CPU target"):
        choose_targets(("cuda",), read_hardware())


def test_a_short_search_leaves_its_records(each_target, model, tmp_path, monkeypatch):
    """Ten virtual seconds: a few programs per M, as one buys, may all be slower than the rules'."""
    asked = use_virtual_meters(monkeypatch)
    options = {"budget": 10.0, "threads": 1, "database": tmp_path / "db", "weight_dtype": "f32"}
    report = compile_model(model, output=tmp_path / "a.dove", **options)
    assert report.targets == (each_target,)
    lines = (tmp_path / "a.dove/tuning.jsonl").read_bytes().splitlines()
    kept = {decode_record(line).key for line in lines}
    assert report.trials == len(lines) > report.measured == len(kept) > 0
    ran = {(c.kind, c.m, candidate.kernel, candidate.schedule) for c, candidate, _ in asked}
    assert {(key.kind, dict(key.shape)["m"], key.kernel, key.schedule) for key in kept} == ran
    assert report.rows["measured"] > 0
    assert 1 < report.gain.low == report.gain.ratio == report.gain.high
    assert 0 < report.gain.points <= report.gain.of_points


def test_a_search_on_this_machine_ends_whatever_else_runs(model, tmp_path):
    database = tmp_path / "tuning.jsonl"
    report = compile_model(model, output=tmp_path / "a.dove", budget=1.0, database=database)
    ran = TuningDatabase(database)
    assert len(ran) > 0 and {record.status for record in ran} <= {OK, TIMEOUT}
    kept = (tmp_path / "a.dove/tuning.jsonl").read_bytes().splitlines()
    assert report.measured <= report.trials == len(kept)
    assert {decode_record(line).key for line in kept} <= {record.key for record in ran}
    disturbed = any("trials were disturbed" in note for note in report.notes)
    assert disturbed or report.end_to_end or report.rows["measured"] > 0
    open_artifact(report, read_hardware())


def test_a_model_without_tokenizer_is_noted(tmp_path):
    path = save_model(tmp_path / "m", "qwen3")
    report = compile_model(path, output=tmp_path / "a.dove", effort="none")
    assert "token ids" in report.notes[0]
    assert read(tmp_path / "a.dove/models/llm/model.json", ModelFile).tokenizer is None


BAD_OPTIONS = [
    ({"effort": "heroic"}, "effort"),
    ({"budget": -1.0}, "budget"),
    ({"targets": ("z80",)}, "z80"),
    ({"threads": 0}, "threads"),
    ({"threads": 100_000}, "threads"),
    ({"max_step_tokens": 0}, "step"),
    ({"max_step_sequences": 1000}, "step"),
    ({"max_context": 10**9}, "context"),
    ({"weight_dtype": "int3"}, "int3"),
    ({"kv_dtype": "f64"}, "f64"),
    ({"hardware": "/nowhere.json"}, "nowhere"),
    ({"workload": "/nowhere.csv"}, "nowhere"),
    ({"model": "/nowhere"}, "nowhere"),
    ({"speed": "high"}, "no option 'speed'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options(options, message, model, tmp_path):
    options = {"model": model, "effort": "none", **options}
    with pytest.raises(SpecError, match=message):
        compile_model(output=tmp_path / "a.dove", **options)
    assert not [*tmp_path.iterdir()]


def test_bad_tokenizer(model, tmp_path):
    bad = tmp_path / "model"
    bad.mkdir()
    for file in model.iterdir():
        (bad / file.name).hardlink_to(file)
    (bad / "tokenizer.json").unlink()
    (bad / "tokenizer.json").write_text("{")
    with pytest.raises(SpecError, match=r"tokenizer\.json is not valid JSON"):
        compile_model(bad, output=tmp_path / "a.dove", effort="none")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_no_compiler(model, tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CC", "/nowhere/cc")
    monkeypatch.setenv("DOVETAIL_CACHE", str(link_cache(tmp_path, kernels=False)))
    with pytest.raises(ToolchainError, match="nowhere"):
        compile_model(model, output=tmp_path / "a.dove", effort="none")
    assert not (tmp_path / "a.dove").exists()


def test_truncated_weights_leave_nothing(model, tmp_path):
    bad = tmp_path / "model"
    bad.mkdir()
    (bad / "config.json").hardlink_to(model / "config.json")
    whole = (model / "model.safetensors").read_bytes()
    (bad / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpecError, match=r"model\.safetensors is truncated"):
        compile_model(bad, output=tmp_path / "a.dove", effort="none")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_full_disk(model, tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", tmp_path]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with pytest.raises(ArtifactError, match=os.strerror(errno.ENOSPC)):
            compile_model(model, output=tmp_path / "a.dove", effort="none")
        assert not [*tmp_path.iterdir()]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


INTERRUPTED = """
    import sys
    from dovetail.compiler.pipeline import compile_model

    def stop_here(step, done, total):
        if step == sys.argv[3]:
            print("here", flush=True)
            sys.stdin.read()  # the parent interrupts us now

    compile_model(sys.argv[1], output=sys.argv[2], effort="none", progress=stop_here)
"""


@pytest.mark.parametrize("step", ["kernels", "weights", "write"])
def test_interrupted(step, model, tmp_path):
    script = textwrap.dedent(INTERRUPTED)
    command = [sys.executable, "-P", "-c", script, str(model), str(tmp_path / "a.dove"), step]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate()
    assert "ArtifactError: interrupted; nothing was written to" in errors
    assert not [*tmp_path.iterdir()]


def test_a_second_compile_finds_its_trials_on_record(model, tmp_path, monkeypatch):
    asked = use_virtual_meters(monkeypatch)
    database = tmp_path / "tuning.jsonl"
    database.write_bytes(b'{"schema":2,"tor\n')

    def compile_again(name):
        """Return the report, and which work was measured for it."""
        asked.clear()
        options = {"budget": 1.0, "threads": 1, "database": database}
        report = compile_model(model, output=tmp_path / name, **options)
        return report, {case.work for case, _, _ in asked}

    first, tried = compile_again("a.dove")
    assert first.measured > 0 and tried
    assert any("skipped 1 lines (1 not a whole record)" in note for note in first.notes)
    second, more = compile_again("b.dove")
    assert more.isdisjoint(tried)  # only what there was no time for
    assert second.trials - second.measured > 0
    third, _ = compile_again("c.dove")
    assert not asked and third.measured == 0 < third.trials
    kept = (tmp_path / "c.dove/tuning.jsonl").read_bytes().splitlines()
    assert {decode_record(line).key for line in kept} <= {r.key for r in TuningDatabase(database)}


def test_a_compile_measures_again_what_a_busy_machine_has_spoilt(model, tmp_path, monkeypatch):
    asked = use_virtual_meters(monkeypatch)
    options = {"budget": 1.0, "threads": 1, "database": tmp_path / "tuning.jsonl"}
    monkeypatch.setattr(VirtualMeter, "spread", 10.0)
    busy = compile_model(model, output=tmp_path / "a.dove", **options)
    assert (busy.trials, busy.measured, busy.gain) == (0, 0, None) and asked
    assert set(busy.rows) == {"default"}
    assert any("trials were disturbed by other work" in note for note in busy.notes)
    monkeypatch.setattr(VirtualMeter, "spread", 1.0)
    calm = compile_model(model, output=tmp_path / "a.dove", **options)
    assert calm.measured > 0 and calm.rows["measured"] > 0
    assert not any("disturbed" in note for note in calm.notes)


def test_an_unusable_database_is_an_error(model, tmp_path):
    with pytest.raises(SpecError, match="tuning database"):
        compile_model(model, output=tmp_path / "a.dove", database=tmp_path)
    assert list(tmp_path.iterdir()) == []
