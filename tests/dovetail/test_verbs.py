"""compile, inspect, verify and run, as a user calls them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail as face
from dovetail.cli.report import show_count
from dovetail.tiny_world import ENCODER
from dovetail.topology.hardware import dump_hardware, read_hardware
from tests.dovetail.commands import Result, assert_one_sentence, dovetail
from tests.encoders import MODERN, Dense, save_decoder, save_encoder
from tests.models import save_model


def test_help_of_every_verb() -> None:
    for verb in ("compile", "tune", "run", "inspect", "verify", "quickstart", "topo", "kernel"):
        result = dovetail(verb, "--help")
        assert (result.code, result.err) == (0, "")
    assert dovetail("--version").out == f"dovetail {face.__version__}\n"


@pytest.mark.parametrize("arguments", [("bake",), ("compile",), ("run", "--prompt"), ("kernel",)])
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    assert dovetail(*arguments).code == 2


def test_compile_reports(compiled: tuple[Path, Result]) -> None:
    output, result = compiled
    report = json.loads(result.out)
    assert (report["path"], report["family"]) == (str(output), "llama")
    assert set(report["seconds"]) == {"read", "kernels", "schedules", "weights", "write", "plans"}
    assert "kernels" in result.err  # the bars


def test_compile_for_a_described_machine(model: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    machine.write_bytes(dump_hardware(read_hardware()))
    output = tmp_path / "app.dove"
    options = ("--hardware", machine, "--target", "generic", "--threads", "1")
    assert dovetail("compile", model, "-o", output, *options).code == 0
    found = json.loads(dovetail("inspect", output, "--json").out)
    assert found["manifest"]["targets"] == ["generic"]
    assert found["plan"]["decode"]["threads"] == 1
    assert found["hardware"]["source"] == "sysfs"


def test_an_encoder_beside_the_model_is_compiled_and_shown(model: Path, tmp_path: Path) -> None:
    output, modern = tmp_path / "app.dove", tmp_path / "modern"
    save_encoder(modern, "modernbert", **MODERN)
    save_decoder(tmp_path / "q", "mistral", sliding_window=24, dense=[Dense(32, 64)])
    beside = ("--model", f"small={ENCODER}", "--model", f"modern={modern}")
    beside += ("--model", f"mistral={tmp_path / 'q'}")
    result = dovetail("compile", model, "-o", output, *beside, "--effort", "none", "--threads", "1")
    assert "small: bert, " in result.out and "modern: modernbert, " in result.out
    text = dovetail("inspect", output, "--all").out
    for words in (
        "encoder small",
        "256 tokens",
        "128 values, mean of a text's rows, of length 1",
        "20 tokens to both sides in 3 layers",
        "4 heads of 16 on 2 of keys, 23 tokens before in 2 layers, else over the text before",
        "32 values, last row, times 32 x 64, of length 1",
        "theta 160000",
        "geglu",
    ):
        assert words in text
    found = json.loads(dovetail("inspect", output, "--json").out)
    names = ("small", "modern", "mistral")
    assert [encoder["file"]["name"] for encoder in found["encoders"]] == list(names)
    for given in ("small", "=x", "small="):
        wrong = dovetail("compile", model, "-o", output, "--model", given)
        assert_one_sentence(wrong)
        assert "NAME=DIRECTORY" in wrong.err


def test_inspect_shows_every_decision(artifact: Path) -> None:
    text = dovetail("inspect", artifact, "--all").out
    found = json.loads(dovetail("inspect", artifact, "--json").out)
    (model,) = found["models"]
    for table in model["schedules"]:
        assert table["op"] in text
        for row in table["rows"]:
            assert row["source"] in ("default", "measured", "reused") and row["source"] in text
    assert {t["name"] for t in model["tapes"]} == {"forward", "sample"}
    assert found["kernels"][0]["target"] in text
    assert show_count(found["plan"]["decode"]["threads"], "thread") in text
    choice, figures = found["choice"], found["choice"]["figures"]
    assert (
        choice["source"] == "simulated" and f"plans simulated for trace {choice['trace']}" in text
    )
    for candidate in (*choice["prefill"], *choice["decode"]):
        assert f"{candidate['simulated']:.4f}" in text and candidate["levels"] in text
    assert all(name in text and figures[name]["source"] in text for name in figures) and figures
    nodes = found["graphs"]["serve"]["nodes"]
    assert {node["place"]["phase"] for node in nodes[:-1]} == {"prefill", "decode"}
    assert nodes[-1]["name"] == "searches" in text and nodes[-1]["place"]["cpus"]
    assert all(node["name"] in text for node in nodes)
    assert sum(w["bytes"] for w in model["file"]["weights"]) > 0


def test_verify(artifact: Path, tmp_path: Path) -> None:
    result = dovetail("verify", artifact)
    assert (result.code, result.err) == (0, "")
    report = json.loads(dovetail("verify", artifact, "--json").out)
    assert (report["ok"], report["faults"]) == (True, [])


@pytest.mark.parametrize("name", ["weights.bin", "serve.json", "model.json", "index.json"])
def test_verify_finds_damage_in_any_file(artifact: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "app.dove"
    shutil.copytree(artifact, copy)
    (damaged,) = copy.rglob(name)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    result = dovetail("verify", copy)
    assert result.code == 1 and name in result.out
    if name != "weights.bin":  # whose hashes are checked on request
        assert_one_sentence(dovetail("run", copy, "--prompt-ids", "1,2"))
    else:
        assert_one_sentence(dovetail("run", copy, "--prompt-ids", "1,2", "--check-weights"))


def test_verify_of_nothing_is_bad_input(tmp_path: Path) -> None:
    assert_one_sentence(dovetail("verify", tmp_path / "none.dove"))


def test_run_streams_what_the_api_generates(artifact: Path) -> None:
    with face.load(artifact) as app:
        (expected,) = app.generate("Dove", max_tokens=12)
    streamed = dovetail("run", artifact, "--raw", "--prompt", "Dove", "--max-tokens", 12)
    assert (streamed.code, streamed.out) == (0, f"{expected.text}\n")
    arguments = ("--raw", "--max-tokens", 12, "--json")
    (result,) = json.loads(dovetail("run", artifact, "--prompt", "Dove", *arguments).out)
    assert tuple(result["token_ids"]) == expected.token_ids
    assert result["first_token_seconds"] > 0


def test_run_of_several_prompts(artifact: Path) -> None:
    prompts = ("--prompt", "One", "--prompt-ids", "65,66,67", "--n", 2, "--temperature", 1)
    results = json.loads(dovetail("run", artifact, *prompts, "--seed", 3, "--json").out)
    assert [r["prompt"] for r in results] == ["One", "One", [65, 66, 67], [65, 66, 67]]
    assert results[0]["token_ids"] != results[1]["token_ids"]
    again = json.loads(dovetail("run", artifact, *prompts, "--seed", 3, "--json").out)
    assert [r["token_ids"] for r in again] == [r["token_ids"] for r in results]
    assert "--- One" in dovetail("run", artifact, *prompts).out


def test_bad_input_is_one_sentence_and_exit_2(model: Path, artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "app.dove"
    empty = tmp_path / "empty"
    empty.mkdir()
    text = shutil.copytree(model, tmp_path / "text")
    (text / "tokenizer.json").write_text('{"model": 1}')
    trace = tmp_path / "trace.csv"
    trace.write_text("a,b\n1,2\n")
    cases: list[tuple[object, ...]] = [
        ("compile", tmp_path / "missing", "-o", out),
        ("compile", empty, "-o", out),
        ("compile", text, "-o", out),
        ("compile", model, "-o", out, "--effort", "heroic"),
        ("compile", model, "-o", out, "--target", "z80"),
        ("compile", model, "-o", out, "--budget", "soon"),
        ("compile", model, "-o", out, "--hardware", tmp_path / "missing.json"),
        ("compile", model, "-o", out, "--workload", trace),
        ("compile", model, "-o", out, "--kv-dtype", "f64"),
        ("compile", model, "-o", out, "--threads", 4096),
        ("compile", model, "-o", "/proc/nowhere/app.dove"),
        ("compile", model, "-o", empty),
        ("inspect", tmp_path / "missing"),
        ("inspect", empty),
        ("inspect", artifact, "--gpu", "h100"),
        ("inspect", artifact, "--nprobe", "4"),
        ("run", empty, "--prompt", "x"),
        ("run", artifact),
        ("run", artifact, "--json"),
        ("run", artifact, "--prompt-ids", "1,x"),
        ("run", artifact, "--prompt", "x", "--input", "y"),
        ("run", artifact, "--prompt-ids", "1,999999"),
        ("run", artifact, "--prompt", "x" * 6000),
        ("run", artifact, "--prompt", "x", "--temperature", "-1"),
        ("run", artifact, "--prompt", "x", "--top-p", "0"),
        ("run", artifact, "--prompt", "x", "--max-tokens", "0"),
        ("run", artifact, "--prompt", "x", "--n", "0"),
        ("run", artifact, "--prompt", "x", "--threads", "0"),
        ("run", artifact, "--prompt", "x", "--device", "gpu"),
        ("run", artifact, "--prompt", "x", "--device", "cuda:255"),
        ("run", artifact, "--prompt", "x", "--offload", "some"),
        ("run", artifact, "--prompt", "x", "--gpu-memory-utilization", "0"),
        ("run", artifact, "--prompt", "x", "--max-num-seqs", "100000"),
        ("run", artifact, "--prompt", "x", "--max-model-len", "1000000"),
        ("serve", artifact, "--max-num-batched-tokens", "4", "--max-num-seqs", "8"),
    ]
    for case in cases:
        result = dovetail(*case)
        sentence = [line for line in result.err.splitlines() if line.startswith("dovetail: ")]
        assert (result.code, len(sentence)) == (2, 1), (case, result)
    assert not out.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "text", "trace.csv"]
    assert list(empty.iterdir()) == []


def test_a_wrong_output_is_told_before_anything_is_read(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    missing, encoder = tmp_path / "missing", ("--embedder", "none")
    for output, said in ((file, "is not an"), (tmp_path / "no/app.dove", "cannot write to")):
        for verb in (("compile", missing), ("index", "build", missing, *encoder)):
            result = dovetail(*verb, "-o", output)
            assert_one_sentence(result)
            assert said in result.err
        with pytest.raises(face.SpecError, match=said):
            face.compile(missing, output=output)


def test_a_model_where_an_artifact_belongs_is_told_to_be_compiled(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for verb, given in itertools.product(("inspect", "verify"), (model, tmp_path / "m.gguf")):
        result = dovetail(verb, given)
        assert result.code, result
        assert f"`dovetail compile {given} -o app.dove`" in result.err + result.out, result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_compile_leaves_nothing(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    script = "from dovetail.cli import main; main()"
    environment = {**os.environ, "DOVETAIL_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script, "compile", model, "-o", tmp_path / "out" / "app.dove"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    (tmp_path / "out").mkdir()
    wait_until_written(tmp_path / "cache", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    said = [line for line in err.splitlines() if line.startswith("dovetail: ")]
    assert len(said) == 1 and "Traceback" not in err, err
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_at_a_terminal_while_schedules_are_measured(model: Path, tmp_path: Path) -> None:
    """It reaches the whole process group: the measuring child must neither speak nor stay."""
    command = [sys.executable, "-P", "-c", SEARCHING, str(model), str(tmp_path / "app.dove")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in err, err
    assert not any(path.is_dir() for path in tmp_path.iterdir())  # trials are kept, and no artifact


SEARCHING = """
import sys
from dovetail.cli import main
from dovetail.compiler.measure import meter as measure

ask = measure.Meter._ask

def tell(self, value, seconds):
    reply = ask(self, value, seconds)  # the child works by now
    print("here", flush=True)
    return reply

measure.Meter._ask = tell
main(["compile", sys.argv[1], "-o", sys.argv[2], "--db", sys.argv[2] + ".jsonl"])
"""


def wait_until_written(path: Path, process: subprocess.Popen[str]) -> None:
    """Return once `path` exists: the kernels are being built into that cache."""
    while not path.exists() and process.poll() is None:
        os.sched_yield()


def test_a_closed_pipe_is_no_error(artifact: Path) -> None:
    script = "from dovetail.cli import main; main()"
    command = [sys.executable, "-P", "-c", script, "inspect", str(artifact), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_inspect_tells_what_differs_between_layers(tmp_path: Path) -> None:
    model, output = save_model(tmp_path / "m", "gemma3", num_hidden_layers=7), tmp_path / "app.dove"
    assert dovetail("compile", model, "-o", output, "--effort", "none").code == 0
    text = " ".join(dovetail("inspect", output, "--all").out.split())
    assert "window 24 in 6 of 7 layers" in text
    assert "theta 10000, factor 1, turns 32 of 32 in 6 of 7 layers" in text
    assert "theta 1e+06, factor 1, turns 32 of 32 in 1 of 7 layers" in text
