from __future__ import annotations

import math
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dovetail.cli.serve_client import Timing, count_answers, summarize
from dovetail.cli.serve_load import DATASETS, LoadSpec, plan_load, read_load_tokenizer
from dovetail.errors import SpecError
from dovetail.tiny_world import LLAMA
from tests.dovetail.commands import assert_one_sentence, dovetail


def test_random_lengths_keep_to_their_range_and_seed() -> None:
    spec = LoadSpec(
        num_prompts=300, random_input_len=100, random_output_len=10, random_range_ratio=0.5
    )
    planned = plan_load(spec, None)
    assert {p.input_tokens for p in planned} == set(range(50, 151)) & {
        p.input_tokens for p in planned
    }
    assert min(p.output_tokens for p in planned) == 5 and all(p.at == 0 for p in planned)
    assert planned == plan_load(spec, None)
    assert len(planned[0].token_ids()) == planned[0].input_tokens
    assert len(planned[0].words().split()) == planned[0].input_tokens
    assert planned[0].token_ids() != planned[1].token_ids()[: len(planned[0].token_ids())]


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    gaps = {}
    for burstiness in (0.25, 1.0, 100.0):
        spec = LoadSpec(num_prompts=4000, rate=5.0, burstiness=burstiness)
        gaps[burstiness] = np.diff([p.at for p in plan_load(spec, None)])
        assert gaps[burstiness].mean() == pytest.approx(0.2, rel=0.1)
    spread = {k: gap.std() / gap.mean() for k, gap in gaps.items()}
    assert spread[0.25] > 1.6 and spread[1.0] == pytest.approx(1, abs=0.1) and spread[100.0] < 0.15


def test_lengths_are_cut_to_the_context() -> None:
    spec = LoadSpec(dataset_name="sharegpt", num_prompts=500)
    for planned in plan_load(spec, 64):
        assert planned.input_tokens <= 32 and planned.input_tokens + planned.output_tokens <= 64
    assert max(p.input_tokens for p in plan_load(spec, None)) > 500


@pytest.mark.parametrize("name", ["azure", "burstgpt", "mooncake"])
def test_traces_come_as_recorded(tmp_path: Path, name: str) -> None:
    texts = {
        "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5000000,7,2\n"
        "2023-11-16 18:17:05.0000000,9,3\n",
        "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,7,2,9,API log\n6.5,ChatGPT,9,3,12,API log\n",
        "mooncake": '{"timestamp": 100, "input_length": 7, "output_length": 2, "hash_ids": []}\n'
        '{"timestamp": 1600, "input_length": 9, "output_length": 3, "hash_ids": []}\n',
    }
    file = tmp_path / ("t.jsonl" if name == "mooncake" else "t.csv")
    file.write_text(texts[name])
    planned = plan_load(LoadSpec(dataset_name=name, dataset_path=file, rate=None), None)
    assert [(p.input_tokens, p.output_tokens) for p in planned] == [(7, 2), (9, 3)]
    assert [p.at for p in planned] == pytest.approx([0.0, 1.5])


def test_prompts_that_are_not_utf_8_are_told(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "Caf\xe9"}')
    with pytest.raises(SpecError, match=r"lines are objects with `prompt`"):
        plan_load(LoadSpec(dataset_name="custom", dataset_path=file), None)


def test_custom_prompts_are_sent_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 5}\n')
    planned = plan_load(
        LoadSpec(dataset_name="custom", dataset_path=file, random_output_len=9), None
    )
    assert [(p.words(), p.output_tokens) for p in planned] == [("one", 9), ("two", 5)]


@pytest.mark.parametrize(
    "spec",
    [
        LoadSpec(dataset_name="none"),
        LoadSpec(dataset_name="azure"),
        LoadSpec(rate=None),
        LoadSpec(rate=-1.0),
        LoadSpec(burstiness=math.nan),
        LoadSpec(num_prompts=0),
    ],
)
def test_wrong_loads_are_told(spec: LoadSpec) -> None:
    with pytest.raises(SpecError):
        plan_load(spec, None)
    assert spec.dataset_name in (*DATASETS, "none")


def test_figures_are_those_of_the_definitions() -> None:
    one = Timing(0.0, [0.1, 0.2, 0.4], 0.5, prompt_tokens=10, output_tokens=5)
    two = Timing(1.0, [1.3], 1.3, prompt_tokens=20, output_tokens=1)
    bad = Timing(1.0, [], 1.1, error="429")
    found = summarize([one, two, bad], 2.0, {"ttft": 200.0}, [50, 99])
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["request_throughput"] == 1.0 and found["request_goodput"] == 0.5
    assert found["slo_attainment"] == pytest.approx(1 / 3)
    assert found["output_throughput"] == 3.0 and found["total_token_throughput"] == 18.0
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["p50_ttft_ms"] == pytest.approx(
        200
    )
    each = [timing.e2el / timing.output_tokens for timing in (one, two)]
    assert found["mean_per_token_ms"] == pytest.approx(500 * sum(each))
    assert found["mean_tpot_ms"] == pytest.approx((100 + 0) / 2)
    assert found["mean_itl_ms"] == pytest.approx(150) and found["median_e2el_ms"] == pytest.approx(
        400
    )


def test_a_tokenizer_makes_and_counts_prompts_and_answers(tmp_path: Path) -> None:
    tokenizer = read_load_tokenizer(str(LLAMA))
    spec = LoadSpec(num_prompts=20, random_input_len=50, random_range_ratio=0.5)
    for planned in plan_load(spec, None, tokenizer):
        count = len(tokenizer.encode(planned.words(), special=False))
        assert count == planned.input_tokens and 25 <= count <= 75
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "The river Ossa"}\n')
    custom = LoadSpec(dataset_name="custom", dataset_path=file)
    (planned,) = plan_load(custom, None, tokenizer)
    assert planned.text == "The river Ossa"
    assert planned.input_tokens == len(tokenizer.encode("The river Ossa")) > 1
    told = Timing(0.0, text="The river Ossa", output_tokens=7, counted=True)
    silent = Timing(0.0, text="The river Ossa", output_tokens=1)
    count_answers([told, silent], lambda text: len(tokenizer.encode(text, special=False)))
    assert told.output_tokens == 7
    assert silent.output_tokens == len(tokenizer.encode("The river Ossa", special=False))
    with pytest.raises(SpecError):
        read_load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "flag", [("--seed", "-1"), ("--random-range-ratio", "-1"), ("--max-concurrency", "-1")]
)
def test_numbers_out_of_range_are_wrong_usage(flag: tuple[str, str]) -> None:
    result = dovetail("bench", "serve", *flag)
    assert result.code == 2 and f"Invalid value for '{flag[0]}'" in result.err


class Asked(BaseHTTPRequestHandler):
    """Lists a model, and says so on stderr when it is asked for more."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        print("a request came", file=sys.stderr)
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        """Be silent."""


def test_a_wrong_rate_among_right_ones_is_told_of_before_anything_is_sent() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        threading.Thread(target=server.serve_forever).start()
        rates = ("--request-rate", "inf", "--request-rate", "-1", "--num-prompts", 1)
        result = dovetail("bench", "serve", "--port", server.server_port, *rates)
        server.shutdown()
    assert_one_sentence(result)
    assert "--request-rate" in result.err


def test_a_load_of_which_nothing_was_answered_fails() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        threading.Thread(target=server.serve_forever).start()
        result = dovetail("bench", "serve", "--port", server.server_port, "--num-prompts", 2)
        server.shutdown()
    assert result.code == 1
    assert "failed: 503" in result.out


def test_wrong_flags_end_in_one_sentence() -> None:
    assert_one_sentence(dovetail("bench", "serve", "--backend", "x"))
    assert_one_sentence(dovetail("bench", "serve", "--request-rate", "fast"))
    assert_one_sentence(dovetail("bench", "serve", "--goodput", "ttft:nan"))
    assert_one_sentence(dovetail("bench", "serve", "--goodput", "itl:5"))
    assert_one_sentence(dovetail("bench", "serve", "--goodput", "ttft:5", "itl:5"))
    assert_one_sentence(dovetail("bench", "serve", "ttft:5"))
    assert_one_sentence(dovetail("bench", "serve", "--metric-percentiles", "50,101"))
    assert_one_sentence(dovetail("bench", "serve", "--percentile-metrics", "ttft,tptot"))
    assert_one_sentence(dovetail("bench", "serve", "--base-url", "http://host:port"))
    plot = dovetail("bench", "serve", "--plot", "curves.png")  # before a server is asked
    assert_one_sentence(plot)
    assert "--plot needs numeric rates" in plot.err
    refused = dovetail("bench", "serve", "--base-url", "http://127.0.0.1:9")
    assert_one_sentence(refused)
    assert "start one with `dovetail serve MODEL`" in refused.err
    assert "such as ttft:500" in dovetail("bench", "serve", "--goodput", "ttft").err
