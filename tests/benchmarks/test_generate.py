"""The generation benchmark runs alone, and its bars count the rows that they are about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.repository import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "benchmarks"))

from generate_bars import BARS, judge, summarise
from generate_models import SHAPES, file_width, make_width, read_tensors, write_checkpoint
from generate_peers import PEERS, Flags, other_flags
from generate_workers import Work, peak_bytes

SCRIPT = ROOT / "benchmarks" / "generate.py"


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def row(**changes: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "width": "Q4_0",
        "work": "decode1",
        "side": "llamacpp",
        "bound": 1.5,
        **changes,
    }


@pytest.mark.parametrize("peers", ["", pytest.param(",".join(PEERS), marks=pytest.mark.long)])
def test_a_quick_run_writes_its_report(tmp_path: Path, peers: str) -> None:
    file = tmp_path / "report.json"
    options = ("--models", "tiny", "--works", "decode1,decode8", "--quick", "--threads", "1")
    options += ("--effort", "none", "--peers", peers, "--json", file)
    done = run(*options)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert set(report["summary"]) >= set(BARS)
    ours = [each for each in report["rows"] if each["side"] == "dovetail"]
    assert [(each["width"], each["work"]) for each in ours] == [
        ("Q4_0", "decode1"),
        ("Q4_0", "decode8"),
    ]
    for each in ours:
        assert each["weights"].startswith("q4_32") and each["rounds"] == 1
        figures = ("tokens_s", "ttft_ms", "peak_mb", "load_s", "read_gb_s", "read_share")
        assert all(each[name] > 0 for name in figures)
    for name in peers.split(",") if peers else ():
        if PEERS[name].missing():
            assert f"{name} is absent" in done.stdout
            continue
        theirs = [each for each in report["rows"] if each["side"] == name]
        assert len(theirs) == 2
        for mine, their in zip(ours, theirs, strict=True):
            assert their["ratio"] == pytest.approx(mine["tokens_s"] / their["tokens_s"])
            assert their["bound"] is None and their["peak_mb"] > 0  # of one round
    again = run(*options, "--resume")
    assert again.returncode == 0, again.stderr
    assert json.loads(file.read_text())["rows"] == report["rows"]


@pytest.mark.parametrize(
    "options",
    [("--models", "7b"), ("--widths", "Q3"), ("--works", "decode2"), ("--rounds", "0")],
)
def test_wrong_options_are_usage_errors(options: tuple[str, ...]) -> None:
    done = run(*options)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_bar_is_the_least_bound_of_the_rows_it_covers() -> None:
    rows = [
        row(bound=1.4),
        row(width="Q4_1", bound=1.3),
        row(side="openvino", bound=1.9),
        row(width="Q8_0", bound=1.1),
        row(work="decode8", bound=1.6),
        row(work="decode8", side="openvino", bound=1.2),
        row(work="prefill512", width="Q4_K_M", bound=3.5),
        row(model="1b", bound=0.1),  # random weights are held to the bandwidth alone
        {**row(model="1b", side="dovetail", load_s=0.4, load_memory=1.02), "read_share": 0.85},
    ]
    summary = summarise(rows)
    assert summary["decode_int4_vs_llamacpp"] == 1.3
    assert summary["decode_int4_vs_openvino"] == 1.9
    assert summary["decode_int8_vs_llamacpp"] == 1.1
    assert summary["decode_batch_vs_best"] == 1.2
    assert summary["prefill_q4km_vs_llamacpp"] == 3.5
    assert summary["prefill_int_vs_best"] is None
    assert (summary["read_share_1b"], summary["load_memory_max"]) == (0.85, 1.02)
    assert summarise([*rows, row(bound=None)])["decode_int4_vs_llamacpp"] is None


def test_bars_are_only_recorded_where_they_do_not_apply() -> None:
    summary = summarise([row(bound=1.4), row(width="Q8_0", bound=1.1)])
    head, *lines = judge(summary, applies=True)
    assert head.startswith("Bars apply")
    assert [line.split()[0] for line in lines] == [
        "decode_int4_vs_llamacpp",
        "decode_int8_vs_llamacpp",
    ]
    assert lines[0].endswith("1.400, bar 1.25: met") and lines[1].endswith(
        "1.100, bar 1.25: missed"
    )
    assert "only recorded" in judge(summary, applies=False)[0]


def test_work_draws_other_prompts_in_each_turn() -> None:
    work = Work("decode", 8, 32, 65)
    assert (work.counted, Work("prefill", 8, 512, 2).counted) == (8 * 64, 8 * 512)
    found = work.prompts(100, 0)
    assert found == work.prompts(100, 0) != work.prompts(100, 1)
    assert [len(prompt) for prompt in found] == [32] * 8
    assert all(3 <= token < 100 for prompt in found for token in prompt)


def test_flags_are_tried_where_they_matter() -> None:
    decode = [change(Flags()) for change in other_flags(Work("decode", 1, 32, 65))]
    assert decode == [Flags(flash="on"), Flags(flash="off")]
    prefill = {change(Flags()) for change in other_flags(Work("prefill", 8, 512, 2))}
    assert prefill >= {Flags(unified=True), Flags(rows=128), Flags(rows=2048)}
    assert Flags("on", 256, unified=True).arguments() == ["-fa", "on", "-ub", "256", "-kvu"]


def test_a_file_has_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    checkpoint, file = tmp_path / "m", tmp_path / "m.gguf"
    write_checkpoint(checkpoint, "tiny", "bf16", 1)
    make_width(checkpoint, file, "BF16")
    assert file_width(file) == "BF16"
    reader = gguf.GGUFReader(file)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == SHAPES["tiny"]["vocab_size"]
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    ours = dict(read_tensors(checkpoint))
    assert len(theirs) == len(ours)
    down = theirs["blk.1.ffn_down.weight"]
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    np.testing.assert_array_equal(values, ours["model.layers.1.mlp.down_proj.weight"])


def test_the_peak_of_memory_has_all_processes_below() -> None:
    script = "import time; b = bytearray(300 << 20); b[::4096] = b'x' * len(b[::4096]); print(1)"
    command = [sys.executable, "-c", f"{script}; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"1\n"
        assert peak_bytes() > 300 << 20 and peak_bytes(child.pid) > 300 << 20
        child.stdin.write(b"\n")
