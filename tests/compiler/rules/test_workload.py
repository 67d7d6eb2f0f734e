"""Workloads from traces, and the payload made of them."""

import gzip
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.rules.payload import make_payload
from dovetail.compiler.rules.workload import (
    DEFAULT_WORKLOAD,
    WorkloadSpec,
    read_times,
    read_workload,
)
from dovetail.ir.errors import SpecError
from dovetail.ir.model import ExpertSpec
from tests.compiler.tape.test_forward import make_spec, make_tape
from tests.topology.corpus import corpus_file

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023,110,27"


def test_azure_csv(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\ufeff" + AZURE)
    workload = read_workload(path)
    assert workload == WorkloadSpec("trace.csv", (4808, 110), (10, 27))
    other = tmp_path / "copy.csv"
    other.write_text(AZURE + "\n")
    assert read_workload(other).fingerprint == workload.fingerprint
    assert read_workload(None).fingerprint == DEFAULT_WORKLOAD.fingerprint != workload.fingerprint


def test_other_columns_and_gzip(tmp_path):
    vidur = tmp_path / "v.csv"
    vidur.write_text("num_prefill_tokens,num_decode_tokens\n3772,54\n")
    assert read_workload(vidur).prompt_lengths == (3772,)
    lines = [json.dumps({"input_length": 5, "output_length": n}) for n in (1, 2)]
    mooncake = tmp_path / "m.jsonl.gz"
    mooncake.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert read_workload(mooncake).output_lengths == (1, 2)


def test_lines_end_where_json_says_and_may_be_empty(tmp_path):
    trace = tmp_path / "t.jsonl"
    lines = [
        json.dumps({"prompt": "a\u2028b\x85", "prompt_len": n, "output_len": 1}, ensure_ascii=False)
        for n in (3, 4)
    ]
    trace.write_text("\r\n\n".join(lines) + "\n\n", newline="")
    assert read_workload(trace).prompt_lengths == (3, 4)


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ("Request tokens", "Response tokens"),
        ("prompt_len", "output_len"),
        ("prompt_tokens", "completion_tokens"),
        ("prompt_tokens", "output_tokens"),
    ],
)
def test_columns_of_other_sets(tmp_path, prompt, output):
    """Other columns (time stamps, models) may stand beside the two that matter."""
    table = tmp_path / "t.csv"
    table.write_text(f"Timestamp,Model,{prompt},{output}\n5,ChatGPT,472,18\n")
    lines = tmp_path / "t.jsonl"
    lines.write_text(json.dumps({"arrival_s": 0.5, prompt: 472, output: 18}) + "\n")
    for path in (table, lines):
        assert read_workload(path) == WorkloadSpec(path.name, (472,), (18,))


@pytest.mark.parametrize(
    ("name", "requests", "mean_prompt"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8819, 2048),
        ("mooncake_conversation_trace.jsonl.gz", 12031, 12035),
        ("osc_summarize_lengths_neo.csv", 2000, 373),
        ("arxiv_summarization_lengths_vidur.csv", 28257, 2588),
    ],
)
def test_real_traces(name, requests, mean_prompt):
    workload = read_workload(corpus_file(f"traces/{name}"))
    assert len(workload.prompt_lengths) == len(workload.output_lengths) == requests
    assert round(sum(workload.prompt_lengths) / requests) == mean_prompt


BAD = {
    "columns.csv": ("a,b\n1,2\n", "none of the columns ContextTokens"),
    "empty.csv": ("", "no requests"),
    "word.csv": (AZURE + "\nx,many,3", "request 3: ContextTokens is 'many'"),
    "negative.csv": (AZURE + "\nx,-5,3", "request 3"),
    "short.csv": (AZURE + "\nx", "request 3"),
    "nan.jsonl": ('{"input_length": NaN, "output_length": 1}', "request 1"),
    "broken.jsonl": ("{", "line 1"),
    "list.jsonl": ("[1]", "line 1"),
    "notes.txt": ("hello", "must be a .csv or .jsonl file"),
    "fake.csv.gz": ("not gzip", "cannot be read"),
    "zeros.csv": ("ContextTokens,GeneratedTokens\n0,0\n0,0", "no requests"),
    "long.csv": (AZURE + "\n" + "x" * 200_000 + ",5,3", "field larger than"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces(name, tmp_path):
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=message) as caught:
        read_workload(tmp_path / name)
    assert name in str(caught.value)


def test_a_damaged_gzip_file_is_a_bad_trace(tmp_path):
    data = bytearray(gzip.compress((AZURE + "\nx,5,3\n" * 50).encode()))
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "trace.csv.gz").write_bytes(data)
    with pytest.raises(SpecError, match=r"trace.csv.gz"):
        read_workload(tmp_path / "trace.csv.gz")


def test_missing_trace(tmp_path):
    with pytest.raises(SpecError, match=r"^there is no trace .*none\.csv$"):
        read_workload(tmp_path / "none.csv")


lengths = st.lists(st.integers(0, 5000), min_size=1, max_size=20)


@given(lengths, lengths, st.integers(1, 64), st.integers(1, 600))
def test_step_sizes_are_a_distribution(prompts, outputs, concurrency, max_tokens):
    workload = WorkloadSpec("t", tuple(prompts), tuple(outputs), concurrency)
    if not sum(prompts) + sum(outputs):
        return
    sizes = workload.step_sizes(max_tokens)
    assert sum(sizes.values()) == pytest.approx(1)
    assert all(1 <= size <= max_tokens for size in sizes)
    assert list(sizes) == sorted(sizes)


def test_payload_has_every_gemm_of_the_tape():
    spec = make_spec(attention_bias=True)
    payload = make_payload(spec, DEFAULT_WORKLOAD, 64, 8)
    entries = [entry for entry in make_tape(spec).entries if len(entry.slots) > 9]
    counted = {
        (use.gemm.op, use.gemm.n, use.gemm.k): sum(e.op == use.gemm.op for e in entries)
        for use in payload.uses
    }
    assert counted == {(u.gemm.op, u.gemm.n, u.gemm.k): u.calls for u in payload.uses}
    assert all(sum(use.sizes.values()) == pytest.approx(1) for use in payload.uses)
    assert payload.largest("head") <= 8
    assert payload.largest("qkv") == 64


def test_steps_of_more_rows_have_more_experts():
    spec = make_spec(experts=ExpertSpec(count=8, used=2), intermediate_size=112)
    dense, mixed = (make_payload(s, DEFAULT_WORKLOAD, 64, 8) for s in (make_spec(), spec))
    uses = {use.gemm.op: use for use in mixed.uses}
    whole = {use.gemm.op: use for use in dense.uses}["gate_up"]
    wanted = sum(size * share for size, share in whole.sizes.items()) * 2 * spec.n_layers
    for op in ("gate_up", "down"):  # rows of all calls, but for those that M rounds
        rows = sum(m * share for m, share in uses[op].sizes.items()) * uses[op].calls
        assert rows == pytest.approx(wanted, rel=0.1)
        assert uses[op].calls == 2 * spec.n_layers and max(uses[op].sizes) == 16
    assert uses["router"].calls == spec.n_layers


def test_what_all_tokens_go_through_has_all_rows():
    experts = ExpertSpec(count=8, used=2, shared=112, dense=240, dense_layers=(True, False))
    spec = make_spec(experts=experts, intermediate_size=112, n_layers=2)
    uses = make_payload(spec, DEFAULT_WORKLOAD, 64, 8).uses
    shapes = {(u.gemm.op, u.gemm.n): (u.calls, max(u.sizes)) for u in uses}
    assert shapes["gate_up", 112] == (2, 16)
    assert shapes["dense_gate_up", 112] == shapes["dense_gate_up", 240] == (1, 64)


@pytest.mark.parametrize(
    ("name", "text", "gaps"),
    [
        (
            "azure.csv",
            "TIMESTAMP,x\n2023-11-16 18:17:03.9799600,1\n2023-11-16 18:17:05,1",
            [1.02004],
        ),
        (
            "azure2024.csv",
            "TIMESTAMP,x\n2024-05-10 00:00:00.009930+00:00,1\n2024-05-10 00:00:02.5+00:00,1",
            [2.49007],
        ),
        ("mooncake.jsonl", '{"timestamp": 0}\n{"timestamp": 3000}\n{"timestamp": 3500}', [3, 0.5]),
        ("burst.csv", "Timestamp,x\n5,1\n45,1", [40]),
        ("ours.jsonl", '{"arrival_s": 0.5}\n{"arrival_s": 0.75}', [0.25]),
        ("lengths.csv", "input_tokens,output_tokens\n1,2", []),
    ],
)
def test_times_of_traces(tmp_path, name, text, gaps):
    path = tmp_path / name
    path.write_text(text)
    times = read_times(path)
    assert [b - a for a, b in itertools.pairwise(times)] == pytest.approx(gaps, abs=1e-6)


def test_a_bad_time_names_its_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,x\n2023-11-16 18:17:03,1\nyesterday,2\n")
    with pytest.raises(SpecError, match="request 2: TIMESTAMP is 'yesterday'"):
        read_times(path)
