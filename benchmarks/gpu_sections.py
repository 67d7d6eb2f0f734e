"""The sections of `gpu_report.py`, each a process: what is measured, for how long at most.

In: a section's name and a device. Out: a JSON list of flat rows. A section that this machine or
device cannot have ends with the status LEFT_OUT and says why in one line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from generate_models import SHAPES, write_checkpoint

WORKERS = 8
"""Processes that run tests, each with a context of its own on the device: 0.5 GiB on NVIDIA's."""
LEFT_OUT = 3
"""Exit status of a section that has nothing to measure here."""
Row = dict[str, Any]
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Setting:
    """A device of `dovetail.load`, and whether shapes are small."""

    device: str
    tiny: bool
    work: Path = Path()

    @property
    def torch_device(self) -> str:
        """The device's name in torch."""
        return self.device.removeprefix("torch:")

    def options(self) -> list[str]:
        """Return the options that make a section's process have this setting."""
        return ["--device", self.device, *(["--tiny"] if self.tiny else [])]


@dataclass(frozen=True, slots=True)
class Section:
    """What a section does, and the seconds it may take."""

    run: Callable[[Setting], list[Row]]
    seconds: int
    about: str


class Nothing(Exception):
    """There is nothing to measure here; says why."""


# ---- tests ----


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def run_tests(setting: Setting) -> list[Row]:
    """Run the tests that need an accelerator; one row, and one for each that failed."""
    file = setting.work / "tests.xml"
    where = ["tests/codegen/kernels/test_gemm_skinny.py"] if setting.tiny else ["tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not long", *where]
    command += [f"--junitxml={file}", "-p", "no:cacheprovider", "-n", str(min(WORKERS, cpus()))]
    done = subprocess.run(command, cwd=HERE.parent, check=False)
    if done.returncode not in (0, 1) or not file.exists():
        raise SystemExit(f"pytest ended with status {done.returncode}")
    cases = list(ET.parse(file).getroot().iter("testcase"))
    failed = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = sum(any(part.tag == "skipped" for part in case) for case in cases)
    passed = len(cases) - len(failed) - skipped
    counts = {"tests": "all", "passed": passed, "failed": len(failed), "skipped": skipped}
    return [counts, *({"tests": case.get("name"), "failed": 1} for case in failed)]


# ---- generation ----


@dataclass(frozen=True, slots=True)
class Work:
    """Rows at once, tokens of each prompt and of each answer."""

    name: str
    rows: int
    prompt: int
    answer: int


WORKS = (Work("decode 1", 1, 64, 128), Work("decode 16", 16, 64, 128), Work("prefill", 4, 2048, 1))
TINY_WORKS = (Work("decode 1", 1, 8, 6), Work("decode 2", 2, 8, 6), Work("prefill", 2, 32, 1))


def prompts_of(work: Work, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return random token ids: others for each seed, so that no kept prefix helps."""
    rng = np.random.default_rng((seed, work.prompt))
    return rng.integers(3, vocab, (work.rows, work.prompt)).tolist()


def compile_shape(setting: Setting, shape: str, **options: Any) -> tuple[Path, Path]:
    """Return a checkpoint of random bfloat16 weights, and its artifact."""
    import dovetail

    checkpoint, artifact = setting.work / shape, setting.work / f"{shape}.dove"
    write_checkpoint(checkpoint, shape, "bf16", 0)
    if not artifact.exists():
        dovetail.compile(checkpoint, output=artifact, effort="none", **options)
    return checkpoint, artifact


def measure_speed(shape: str, setting: Setting) -> list[Row]:
    """Time each work on our side and on transformers', which take turns with the device."""
    shape = "tiny" if setting.tiny else shape
    works = TINY_WORKS if setting.tiny else WORKS
    checkpoint, artifact = compile_shape(setting, shape)
    vocab = SHAPES[shape]["vocab_size"]
    rows = [
        {"shape": shape, "layers": SHAPES[shape]["num_hidden_layers"], "side": side, **row}
        for side, measure in (("dovetail", time_ours), ("transformers", time_theirs))
        for row in measure(setting, artifact if side == "dovetail" else checkpoint, works, vocab)
    ]
    theirs = {row["work"]: row["tokens_per_second"] for row in rows if row["side"] != "dovetail"}
    for row in rows:
        row["ratio"] = round(row["tokens_per_second"] / theirs[row["work"]], 3)
    return rows


def time_ours(setting: Setting, artifact: Path, works: Sequence[Work], vocab: int) -> list[Row]:
    """Return the rows of `dovetail.load` on the device, the CPU left out."""
    import dovetail

    with dovetail.load(artifact, device=setting.device, offload="off", trust=True) as app:
        fixed = {"temperature": 0.0, "ignore_eos": True}
        return [
            speed(work, lambda n, p: app.generate(p, max_tokens=n, **fixed), vocab)
            for work in works
        ]


def time_theirs(setting: Setting, folder: Path, works: Sequence[Work], vocab: int) -> list[Row]:
    """Return the rows of transformers' own generation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to(setting.torch_device).eval()

    def generate(tokens: int, prompts: list[list[int]]) -> object:
        ids = torch.tensor(prompts, device=setting.torch_device)
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        return made.tolist()  # waits for the device

    return [speed(work, generate, vocab) for work in works]


def speed(work: Work, generate: Callable[[int, list[list[int]]], object], vocab: int) -> Row:
    """Return tokens per second: of prompts, or of answers after their first token.

    The better of two runs, after one that is not counted.
    """
    drawn = (prompts_of(work, vocab, seed) for seed in count())
    generate(min(work.answer, 4), next(drawn))
    first = min(seconds(generate, 1, next(drawn)) for _ in range(2))
    if work.answer == 1:
        return {"work": work.name, "tokens_per_second": work.rows * work.prompt / first}
    whole = min(seconds(generate, work.answer, next(drawn)) for _ in range(2))
    tokens = work.rows * (work.answer - 1)
    return {"work": work.name, "tokens_per_second": tokens / max(whole - first, 1e-9)}


def seconds(act: Callable[..., object], *given: object) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    act(*given)
    return time.perf_counter() - begun


# ---- NEO ----


def measure_neo(setting: Setting) -> list[Row]:
    """Time one load with all its KV on the device and, where that does not fit, with the CPU."""
    import dovetail

    shape, requests = ("tiny", 6) if setting.tiny else ("llama-1b", 96)
    prompt, answer = (40, 8) if setting.tiny else (512, 128)
    _, artifact = compile_shape(setting, shape)
    work, vocab = Work("neo", requests, prompt, answer), SHAPES[shape]["vocab_size"]
    quarter = max(requests * -(-(prompt + answer) // 16) // 4, 8)
    rows: list[Row] = []
    for offload in ("off", "auto"):
        options = {"device": setting.device, "offload": offload, "gpu_blocks": quarter}
        with dovetail.load(artifact, trust=True, **options) as app:
            run = partial(app.generate, max_tokens=answer, ignore_eos=True, temperature=0.0)
            run(prompts_of(work, vocab, 1)[: requests // 4])
            rate = requests * answer / seconds(run, prompts_of(work, vocab))
        rows.append({"offload": offload, "gpu_blocks": quarter, "tokens_per_second": rate})
    rows[1]["auto_vs_off"] = round(rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"], 3)
    return rows


# ---- generated products ----


def measure_products(setting: Setting) -> list[Row]:
    """Compare generated products of an 8B shape with torch's, in bfloat16 and in blocks."""
    if not setting.device.startswith("cuda"):
        raise Nothing("generated products run on NVIDIA GPUs only")
    from gpu_products import compare_products

    return compare_products(setting.device, setting.work, tiny=setting.tiny)


# ---- retrieval ----


def measure_clusters(setting: Setting) -> list[Row]:
    """Scan hot clusters on the device and on the CPU."""
    try:
        from gpu_clusters import compare_scans, torch_lists
    except ImportError as error:
        raise Nothing(f"an index is needed: {error}") from None
    return compare_scans(torch_lists(setting.device), tiny=setting.tiny)


# ---- encoders ----


def measure_encoders(setting: Setting) -> list[Row]:
    """Embed texts of random tokens on the device: ours, and transformers' on padded batches."""
    import torch
    import transformers

    import dovetail

    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4 if setting.tiny else 16, "vocab_size": 30522}
    config = transformers.BertConfig(**(small if setting.tiny else wide), **heads)
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False).to(torch.bfloat16).eval()
    folder, artifact = setting.work / "encoder", setting.work / "encoder.dove"
    model.save_pretrained(folder)
    dovetail.compile(folder, output=artifact, effort="none")
    rng = np.random.default_rng(0)
    most, longest = (8, 24) if setting.tiny else (256, 256)
    texts = [rng.integers(5, 30000, n).tolist() for n in rng.integers(4, longest, most)]
    model = model.to(setting.torch_device)

    def theirs() -> None:
        for first in range(0, most, 32):
            part = [torch.tensor(text) for text in texts[first : first + 32]]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(setting.torch_device)
            with torch.inference_mode():
                model(ids, attention_mask=(ids > 0).long()).last_hidden_state.mean(1).float().cpu()

    with dovetail.load(artifact, device=setting.device, trust=True) as app:
        sides = {"dovetail": lambda: app.embed(texts), "transformers": theirs}
        rows = []
        for side, act in sides.items():
            act()
            took = min(seconds(act) for _ in range(3))
            rows.append({"side": side, "texts": most, "texts_per_second": most / took})
    rows[0]["ratio"] = round(rows[0]["texts_per_second"] / rows[1]["texts_per_second"], 3)
    return rows


SECTIONS = {
    "tests": Section(run_tests, 140, "The suite's part for accelerators."),
    "speed-1b": Section(
        partial(measure_speed, "llama-1b"), 100, "Llama 3.2 1B's shape, bfloat16, random weights."
    ),
    "speed-8b": Section(
        partial(measure_speed, "llama-8b"),
        150,
        "Llama 3.1 8B's shape, 8 of its 32 layers, bfloat16, random weights.",
    ),
    "neo": Section(measure_neo, 70, "The device's pool holds a quarter of the requests' KV."),
    "products": Section(
        measure_products, 60, "Times of generated products as a share of torch's own, by rows."
    ),
    "clusters": Section(measure_clusters, 30, "Scans of hot clusters, device and CPU."),
    "encoders": Section(measure_encoders, 50, "BGE large's shape, bfloat16, random weights."),
}
"""In the order in which they run; ten minutes together."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        rows = SECTIONS[options.section].run(Setting(options.device, options.tiny, options.work))
    except Nothing as error:
        print(error)
        return LEFT_OUT
    options.out.write_bytes(msgspec.json.encode(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
