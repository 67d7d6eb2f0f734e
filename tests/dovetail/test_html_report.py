"""`dovetail inspect`: the summary, and the report as one file: what it shows is what is there."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.table import Table

from dovetail.cli.inspect_plans import explain_loss
from dovetail.cli.inspect_summary import summarise
from dovetail.cli.inspection import (
    Inspection,
    inspect_artifact,
    memory_rows,
    read_sections,
)
from dovetail.cli.report import show_bytes
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.rules.schedules import gemm_ops
from dovetail.html_report.pictures import rewrite_request
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.plans import PairChoice
from dovetail.ir.tuning import OK, TIMEOUT, HardwareKey, Reference, TuningRecord, encode_record
from dovetail.tiny_world import ENCODER, LLAMA
from dovetail.workflows import hyde, one_shot
from tests.dovetail.commands import assert_one_sentence, dovetail

ALWAYS = ["summary", "artifact", "plans", "models", "schedules", "memory", "kernels"]


class Page(HTMLParser):
    """Sections by id, each with its rows of cells and its pictures; addresses; scripts, styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self.images: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self.whole: dict[str, list[str]] = {"script": [], "style": []}
        self.policy = ""
        self._section = self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        assert not [name for name in found if name.startswith("on") or name == "style"]
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        self._open = tag
        if tag == "section":
            self._section = found["id"]
            self.rows[self._section], self.images[self._section] = [], []
        elif tag == "tr":
            self.rows[self._section].append([])
        elif tag in ("td", "th"):
            self.rows[self._section][-1].append("")
        elif tag == "img":
            self.images[self._section].append(found["src"])
        elif tag in self.whole:
            self.whole[tag].append("")
        elif found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("td", "th"):
            self.rows[self._section][-1][-1] += data
        elif self._open in self.whole:
            self.whole[self._open][-1] += data


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with quantised weights, an encoder, a workflow, and trials that were made up."""
    output = tmp_path_factory.mktemp("report") / "app.dove"
    models = {"llm": LLAMA, "embedder": ENCODER}
    compile_model(
        models, output=output, effort="none", weight_dtype="int8", workflows=[one_shot(topk=2)]
    )
    (output / "tuning.jsonl").write_bytes(b"".join(map(encode_record, make_records(output))))
    return output


def make_records(artifact: Path) -> list[TuningRecord]:
    """Return trials of one product: at M = 1 the chosen schedule takes half as long."""
    found = inspect_artifact(artifact)
    (model,) = found.models
    table = next(table for table in model.schedules if table.op == "down")
    op = next(op for op in gemm_ops(model.file.spec) if op.op == "down")
    row, reference = table.rows[0], Reference(kernel="x", build="b", schedule=(1,), seconds=4e-5)
    key = HardwareKey(arch="x", isa=(), cpu="x", caches=(1, 1, 1), cores=1, abi=1)

    def record(status: str, kernel: str, schedule: tuple[int, ...], seconds: float) -> TuningRecord:
        return TuningRecord(
            target=table.target, hardware=key, kernel=kernel, build="b", kind=op.kind,
            shape={"n": op.n, "k": op.k, "m": 1}, dtype=op.dtype, threads=table.threads,
            schedule=schedule, status=status, seconds=seconds, low=seconds, high=seconds,
            runs=3 if status == OK else 0, rounds=3, reference=reference, cost=0.25,
            when=datetime(2026, 1, 2, tzinfo=UTC),
        )  # fmt: skip

    return [
        record(OK, "x", (1,), 4e-5),
        record(TIMEOUT, "y", (2,), 0.0),
        record(OK, row.kernel, row.schedule, 2e-5),
    ]


@pytest.fixture(scope="module")
def report(rich: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    trace = {"traceEvents": [{"ph": "X", "name": "</script><b>", "ts": 0, "dur": 5, "pid": 1}]}
    folder = tmp_path_factory.mktemp("html")
    (folder / "trace.json").write_text(json.dumps(trace))
    options = ("--html", folder / "report.html", "--timeline", folder / "trace.json")
    result = dovetail("inspect", rich, *options)
    assert result.code == 0 and not result.out, result.err
    return Page((folder / "report.html").read_text())


@pytest.fixture(scope="module")
def found(rich: Path) -> Inspection:
    return inspect_artifact(rich)


def test_every_section_is_there_with_the_values_of_every_table(
    report: Page, found: Inspection
) -> None:
    assert set(report.rows) == {*ALWAYS, "what-if", "workflows", "products", "tuning", "timeline"}
    summary = [[name, value] for name, value in summarise(found).items()]
    assert report.rows["summary"] == summary
    for section in read_sections(found):
        for part in section.parts:
            if isinstance(part, Table):
                rows = list(zip(*(column.cells for column in part.columns), strict=True))
                assert rows
                for row in rows:
                    assert list(row) in report.rows[section.name]


def test_formats_show_the_error_of_each_layer(report: Page, found: Inspection) -> None:
    (quantised, _) = (part.quantisation for part in found.parts)
    assert quantised is not None and quantised.weights
    cells = {cell for row in report.rows["schedules"] for cell in row}
    layers = {row[0] for row in report.rows["schedules"]}
    for weight in quantised.weights:
        layer = weight.name.rpartition(".")[0] or "model"
        assert f"{weight.format} {weight.error:.2%}" in cells and layer in layers


def test_memory_adds_up(report: Page, found: Inspection) -> None:
    rows = list(memory_rows(found))
    (model,) = found.models
    weights = sum(weight.bytes for weight in model.file.weights)
    assert ("llm: weights", weights) in [row[:2] for row in rows]
    spec = model.file.spec
    token = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * DTYPES[spec.kv_dtype].size
    assert ("llm: KV", token * spec.max_context) in [row[:2] for row in rows]
    total = show_bytes(sum(size for _, size, _ in rows))
    assert ["total", total, ""] in report.rows["memory"]


def test_what_if_begins_with_what_was_planned(report: Page, found: Inspection) -> None:
    assert found.choice is not None
    planned = min(pair.simulated for pair in found.choice.pairs if pair.simulated)
    seconds = {row[0]: float(row[3]) for row in report.rows["what-if"][1:]}
    assert f"{seconds['as it is']:.4f}" == f"{planned:.4f}"
    assert seconds["half of the memory bandwidth"] >= seconds["as it is"]
    assert seconds["twice the memory bandwidth"] <= seconds["as it is"]
    assert seconds["prompts 16 times as long"] > seconds["prompts 4 times as long"] > planned


def test_trials_are_counted_and_products_compared_with_the_default(report: Page) -> None:
    (product,) = (row for row in report.rows["products"] if row[0] == "1")
    assert product[4] == "2.00x" and float(product[1]) == pytest.approx(2 * float(product[2]), 0.02)
    (row,) = report.rows["tuning"][1:]
    assert row[2:8] == ["3", "2", "0", "0", "1", "0.75"] and row[8] == "2.00x"


def test_pictures_show_plans_and_graphs_before_and_after(report: Page, found: Inspection) -> None:
    assert found.choice is not None
    plans = [*found.choice.prefill, *found.choice.decode]
    drawn = [b64decode(url.partition(",")[2]).decode() for url in report.images["plans"]]
    assert all(ElementTree.fromstring(picture).tag.endswith("svg") for picture in drawn)
    coloured = [len(re.findall(r'rx="3" fill="#(?!e8e8e8)', picture)) for picture in drawn]
    assert sorted(coloured) == sorted(len(plan.cpus) for plan in plans)
    before, after = (b64decode(u.partition(",")[2]).decode() for u in report.images["workflows"])
    assert "search" in before and "search#0/0" not in before
    assert "search#0/0" in after and "split" in after


def test_a_request_is_rewritten_as_by_the_control_plane() -> None:
    graph, made = rewrite_request(hyde(topk=2).workflow())
    assert {"split_reply", "split"} <= set(made)
    assert any(node.clusters for node in graph.nodes) and any(
        node.provisional for node in graph.nodes
    )


def test_it_needs_no_network_and_runs_only_its_own_script(report: Page) -> None:
    assert all(address.startswith(("#", "data:")) for address in report.addresses)
    (style,), (trace, script) = report.whole["style"], report.whole["script"]
    assert not re.search(r"https?://|@import|url\(", style + script)
    for kind, text in (("style", style), ("script", script)):
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in report.policy
    assert report.policy.startswith("default-src 'none'") and "unsafe" not in report.policy
    assert json.loads(trace)["traceEvents"][0]["name"] == "</script><b>"


def test_what_is_not_there_has_no_section(tmp_path: Path) -> None:
    compile_model(ENCODER, output=tmp_path / "e.dove", effort="none")
    options = ("--html", tmp_path / "r.html", "--json")  # the JSON is not left out for the page
    result = dovetail("inspect", tmp_path / "e.dove", *options)
    assert result.code == 0, result.err
    assert json.loads(result.out)["path"] == str(tmp_path / "e.dove")
    page = Page((tmp_path / "r.html").read_text())
    assert list(page.rows) == ALWAYS
    assert page.whole["script"] == [] and "script-src 'none'" in page.policy


def test_the_summary_is_short_and_all_is_all(rich: Path, found: Inspection) -> None:
    text = dovetail("inspect", rich).out
    assert len(text.splitlines()) <= 21
    for value in summarise(found).values():
        assert value.split()[0] in text
    assert len(dovetail("inspect", rich, "--all").out.splitlines()) > 100


def test_wrong_timelines_and_places_are_told(artifact: Path, tmp_path: Path) -> None:
    page, bad = tmp_path / "r.html", tmp_path / "bad.json"
    assert_one_sentence(dovetail("inspect", artifact, "--timeline", bad))
    for data in (b"{", b"[]", b'{"traceEvents": 1}', b'{"name": "\xe9"}'):
        bad.write_bytes(data)
        assert_one_sentence(dovetail("inspect", artifact, "--html", page, "--timeline", bad))
        assert not page.exists()
    assert "cannot write" in dovetail("inspect", artifact, "--html", tmp_path / "no/r.html").err


@pytest.mark.parametrize(
    ("lost", "chosen", "why"),
    [
        ((2.0, None), (1.0, None), "2.00x the time, simulated"),
        ((0.5, 3.0), (1.0, 2.0), "1.50x the time, measured"),
        ((0.5, None), (1.0, None), "not measured: only that may prefer fewer cores"),
        ((0.5, None), (1.0, 2.0), "not measured"),
    ],
)
def test_why_a_plan_lost(
    lost: tuple[float, float | None], chosen: tuple[float, float | None], why: str
) -> None:
    pairs = [PairChoice(prefill=0, decode=0, simulated=s, measured=m) for s, m in (lost, chosen)]
    assert explain_loss(*pairs) == why


def test_a_report_runs_no_code_of_an_artifact(rich: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from dovetail import END, START, RAGraph\n"
        "def shorten(state):\n    return str(state['input'])[:9]\n"
        "g = RAGraph('own')\n"
        "g.add_function('cut', shorten, output='short')\n"
        "g.add_generation('say', prompt='{short}', output='answer')\n"
        "g.add_edge(START, 'cut'); g.add_edge('cut', 'say'); g.add_edge('say', END)\n"
    )
    output = tmp_path / "own.dove"
    compile_model(LLAMA, output=output, effort="none", workflows=[file])
    (stored,) = output.glob("graph/*.py")
    stored.write_text("raise SystemExit(7)\n")
    result = dovetail("inspect", output, "--html", tmp_path / "r.html")
    assert result.code == 0, result.err
    assert len(Page((tmp_path / "r.html").read_text()).images["workflows"]) == 1


def test_texts_of_an_artifact_are_shown_as_they_are(tmp_path: Path) -> None:
    """Brackets and colons in them are no marks for the terminal."""
    output, prompt = tmp_path / "[b].dove", "[INST] :cat: {docs} {input} [/INST]"
    compile_model(LLAMA, output=output, effort="none", workflows=[one_shot(answer=prompt)])
    for options in ((), ("--all",)):
        result = dovetail("inspect", output, *options)
        assert result.code == 0 and "[b].dove" in result.out, result.err
    assert prompt in result.out
    assert dovetail("inspect", output, "--html", tmp_path / "r.html").code == 0
    rows = Page((tmp_path / "r.html").read_text()).rows["workflows"]
    assert any(f"prompt: {prompt}" in cell for row in rows for cell in row)


def test_where_there_is_no_compiler_the_rules_serve(
    monkeypatch: pytest.MonkeyPatch, artifact: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOVETAIL_CC", str(tmp_path / "none"))
    made = compile_model(LLAMA, output=tmp_path / "app.dove", effort="fast")
    assert made.effort == "none" and made.measured == 0 and "by rules" in made.notes[0]
    assert inspect_artifact(tmp_path / "app.dove").manifest.effort == "none"
    shutil.rmtree(tmp_path / "app.dove")
