"""`dovetail topo`, on this machine and on those of the corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace

from dovetail.cli import report as reports
from dovetail.cli.app import app
from dovetail.errors import SpecError
from dovetail.topology.hardware import dump_hardware, read_hardware
from tests.dovetail.commands import assert_one_sentence, dovetail
from tests.topology.corpus import TOPOLOGIES, corpus_file, truths

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}  # no weights beside it: config.json is enough to plan


MIXES = ("1:0:0", "0:0:1")


def report(*arguments: object) -> dict[str, Any]:
    result = dovetail("topo", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def chosen(plan: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the candidates of both phases that were chosen."""
    choice = plan["choice"]
    return tuple(choice[phase][choice["pairs"][0][phase]] for phase in ("prefill", "decode"))


def test_this_machine() -> None:
    machine = report()
    spec = read_hardware()
    assert machine["allowed_pus"] == len(spec.allowed_pus)
    assert machine["tree"]["kind"] == "machine" and machine["tree"]["children"]
    text = dovetail("topo").out
    assert f"{spec.cores} cores" in text


KINDS = {
    "epyc-7h12-2s-nps4.xml": (2, 8, 0, 32, 128, 256, 256),
    "opteron-865-8s-cpuset-disallowed.xml": (8, 8, 0, 0, 15, 15, 10),
    "jetson-orin-nx.lscpu-p.csv": (2, 0, 0, 2, 8, 8, 8),
}
COUNTS = (
    "sockets",
    "numa_nodes",
    "memory_only_nodes",
    "l3_groups",
    "cores",
    "pus",
    "allowed_pus",
)


@pytest.mark.parametrize("name", KINDS)
def test_json_counts(name: str) -> None:
    machine = report("--hardware", corpus_file(f"topologies/{name}"))
    assert tuple(machine[count] for count in COUNTS) == KINDS[name]


def test_a_plan_keeps_to_the_cpu_quota_as_a_compile_does(tmp_path: Path) -> None:
    machine = replace(read_hardware("package:1 core:8"), cpu_quota=3.5)
    (tmp_path / "hardware.json").write_bytes(dump_hardware(machine))
    plan = report("--hardware", tmp_path / "hardware.json", "--plan", "tinyllama")["plan"]
    for phase in chosen(plan):
        assert phase["processes"] * phase["threads"] <= 3
    assert any("quota of 3.5 cores" in note for note in plan["choice"]["notes"])


def test_a_plan_as_tables_and_as_json(tmp_path: Path) -> None:
    line = ("--hardware", "package:2 l3:2 core:4 pu:2", "--plan", "tinyllama")
    text = dovetail("topo", *line).out
    for word in ("prefill candidates", "decode candidates", "chosen", "0-7", "seconds per request"):
        assert word in text
    plan = report(*line)["plan"]
    choice, (prefill, _) = plan["choice"], chosen(plan)
    assert choice["source"] == "simulated"
    assert prefill["processes"] * prefill["threads"] >= 16
    assert len(choice["decode"]) >= 10  # those in no pair, too
    assert all(figure["source"] for figure in choice["figures"].values())
    assert plan["search"]["patterns"][0] == "as shown by the system"
    assert {"cut", "group_trees_total"} <= plan["search"].keys()


def test_a_picture_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    options = ("--hardware", "package:2 core:4", "--svg", file)
    assert dovetail("topo", *options).code == 0
    assert "decode plan" not in file.read_text()
    assert dovetail("topo", *options, "--plan", "tinyllama").code == 0
    assert "decode plan for tinyllama" in file.read_text()


def test_no_picture_of_a_report_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_report: object) -> None:
        raise SpecError("no room")

    monkeypatch.setattr(reports, "print_json", fail)
    options = ("--hardware", "core:4", "--svg", tmp_path / "tree.svg", "--json")
    assert_one_sentence(dovetail("topo", *options))
    assert not list(tmp_path.iterdir())


def test_workload_batch_and_model_directory(tmp_path: Path) -> None:
    config = tmp_path / "tiny/config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n64,8\n")
    options = ("--hardware", "core:4", "--workload", trace, "--batch", "4", "--every-divisor")
    plan = report(*options, "--plan", tmp_path / "tiny")["plan"]
    assert (plan["choice"]["trace"], plan["choice"]["batches"]) == ("t.csv", [4])
    file = report(*options, "--plan", config)["plan"]
    assert file["choice"]["pairs"] == plan["choice"]["pairs"]
    wide = report(*options, "--plan", config, "--weight-dtype", "f32")["plan"]
    assert chosen(wide)[1]["simulated"] > chosen(plan)[1]["simulated"]


def test_a_saved_machine_is_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    file.write_bytes(dump_hardware(read_hardware("package:2 core:3 pu:2")))
    one = report("--hardware", file)
    assert one == report("--hardware", "package:2 core:3 pu:2")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hardware", "/nowhere/x.xml"),
        ("--hardware", "package:2"),
        ("--plan", "no-such-model"),
        ("--svg", "/nowhere/plan.svg"),
        ("--plan", "tinyllama", "--weight-dtype", "int3"),
        ("--plan", "tinyllama", "--workload", "/nowhere/t.csv"),
        ("--plan", "tinyllama", "--mix", "1:1"),
        ("--plan", "tinyllama", "--index", "/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...]) -> None:
    assert_one_sentence(dovetail("topo", *arguments))


@pytest.mark.parametrize(
    "options",
    [
        ("--workload", "t.csv"),
        ("--batch", "1"),
        ("--weight-dtype", "f32"),
        ("--every-divisor",),
        ("--mix", "1:1:1"),
        ("--index", "idx"),
    ],
)
def test_options_of_a_plan_need_one(options: tuple[str, ...]) -> None:
    result = dovetail("topo", *options)
    assert_one_sentence(result)
    assert f"{options[0]} only works with --plan MODEL" in result.err


def test_every_option_of_a_plan_stands_in_its_panel() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    panels = {option.name: option.rich_help_panel for option in group.commands["topo"].params}
    own = {name for name, panel in panels.items() if panel == "Plan"}
    assert own == {"plan", "workload", "batch", "weight_dtype", "every_divisor", "mix", "index"}


def test_a_machine_of_one_core_is_planned_for() -> None:
    result = dovetail("topo", "--hardware", "core:1", "--plan", "tinyllama")
    assert (result.code, result.err) == (0, "")
    assert "1 x 1" in result.out and "chosen" in result.out


def test_a_plan_of_fewer_cores_says_that_a_compile_without_measuring_takes_all(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    line = ("--hardware", "package:2 numa:2 l3:4 core:4 pu:2", "--plan", tmp_path)
    plan = report(*line)["plan"]
    _, decode = chosen(plan)
    assert decode["processes"] * decode["threads"] < 64
    said = "a compile that measures nothing takes all cores: "
    assert any(note.startswith(said) for note in plan["choice"]["notes"])
    small = report("--hardware", "core:1", "--plan", tmp_path)["plan"]
    assert not any(note.startswith(said) for note in small["choice"]["notes"])


def test_the_division_is_that_of_the_mix_given() -> None:
    line = ("--hardware", "package:1 core:8", "--plan", "tinyllama", "--mix")
    (chats,), (texts,) = (report(*line, mix)["plan"]["divisions"].items() for mix in MIXES)
    assert chats[0].startswith(f"{MIXES[0]} chats") and texts[0].startswith(f"{MIXES[1]} chats")
    busy = [
        {stage: len(cpus) for stage, cpus in of[1][0]["shares"].items()} for of in (chats, texts)
    ]
    assert busy[0]["prefill"] > busy[1]["prefill"] and busy[0]["encoders"] < busy[1]["encoders"]


def test_why_a_division_is_chosen_holds_of_it() -> None:
    """Not that it is the fastest one, which it need not be."""
    line = ("--hardware", "package:1 core:8", "--plan", "tinyllama")
    text = " ".join(dovetail("topo", *line).out.split())
    assert "at most 2% slower than the fastest, the one whose busiest worker has least" in text
    for first, *others, _ in report(*line)["plan"]["divisions"].values():
        fastest = min(each["seconds"] for each in (first, *others))
        assert first["seconds"] <= 1.02 * fastest
        alike = [each for each in others if each["seconds"] <= 1.02 * fastest]
        assert all(first["busiest"] <= each["busiest"] for each in alike)


@pytest.mark.long
@pytest.mark.parametrize("file", [truth.file for truth in truths()])
def test_planning_for_every_machine_says_what_it_used_and_cut(file: str) -> None:
    plan = report("--hardware", TOPOLOGIES / file, "--plan", "llama-3-8b")["plan"]
    assert plan["search"]["patterns"] and chosen(plan)[1]["cpus"]
