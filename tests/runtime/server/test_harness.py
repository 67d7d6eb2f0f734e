"""lm-evaluation-harness against a live server: tasks from a local file, checked by transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.tiny_world import LLAMA, corpus
from tests.runtime.server.live import Live, serving

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="there is no lm-evaluation-harness; pip install -c constraints.txt -e '.[harness]'",
    ),
]
CHOICE = """
task: zorvia-choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: zorvia-perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: passage
metric_list: [{{metric: word_perplexity}}]
"""
Logprobs = Callable[[list[int]], npt.NDArray[np.float64]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of the bundled Llama in float32: products in pairs of bfloat16 would round."""
    folder = tmp_path_factory.mktemp("harness")
    path = folder / "llama.dove"
    compile_model(LLAMA, output=path, effort="none", threads=1, weight_dtype="f32")
    with serving(path, log=folder / "serve.log") as live:
        yield live


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks over one file of questions with four answers and a passage each."""
    folder = tmp_path_factory.mktemp("tasks")
    asked, passages = corpus.questions("test")[:40], corpus.passages()[:40]
    lines = []
    for i, (question, passage) in enumerate(zip(asked, passages, strict=True)):
        others = [asked[(i + step) % len(asked)].answer for step in (7, 13, 22)]
        choices = [" " + text for text in (question.answer, *others)]
        line = {
            "question": question.question,
            "choices": choices,
            "label": 0,
            "passage": passage.text,
        }
        lines.append(json.dumps(line))
    file = folder / "questions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    (folder / "choice.yaml").write_text(CHOICE.format(file=file))
    (folder / "rolling.yaml").write_text(ROLLING.format(file=file))
    return folder


@pytest.fixture(scope="module")
def logprobs() -> Iterator[Logprobs]:
    """Log probabilities after each token, in float64."""
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float64).eval()
    with torch.no_grad():
        yield lambda ids: np.asarray(
            torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
        )


def evaluate(live: Live, tasks: Path, out: Path, batch: int, **more: object) -> dict[str, Any]:
    """Run both tasks; return results, and the samples of each by `samples/TASK`."""
    given = {"model": "llama", "base_url": f"{live.v1}/completions", "tokenizer": LLAMA, **more}
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in given.items())),
        *("--include_path", str(tasks), "--tasks", "zorvia-choice,zorvia-perplexity"),
        *("--output_path", str(out), "--log_samples", "--batch_size", str(batch)),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "home")}
    environment = {**os.environ, **offline}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = out.rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text())["results"]
    for path in out.rglob("samples_*.jsonl"):
        name = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        found[f"samples/{name}"] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


@pytest.mark.parametrize(
    ("batch", "more"),
    [(8, {}), (1, {"tokenized_requests": False, "num_concurrent": 4})],
    ids=["ids-in-batches", "texts-at-once"],
)
def test_local_completions_agree_with_transformers(
    server: Live,
    tasks: Path,
    logprobs: Logprobs,
    tmp_path: Path,
    batch: int,
    more: dict[str, object],
) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(LLAMA)
    found = evaluate(server, tasks, tmp_path, batch, **more)

    def score(context: list[int], rest: list[int]) -> tuple[float, bool]:
        rows = logprobs([*context, *rest])[len(context) - 1 : -1]
        return float(rows[np.arange(len(rest)), rest].sum()), list(rows.argmax(1)) == rest

    right = 0
    for sample in found["samples/zorvia-choice"]:
        sums = []
        for asked, answered in zip(
            sample["arguments"].values(), sample["filtered_resps"], strict=True
        ):
            context = tokenizer(asked["arg_0"], add_special_tokens=False).input_ids
            whole = tokenizer(asked["arg_0"] + asked["arg_1"], add_special_tokens=False).input_ids
            assert whole[: len(context)] == context
            total, greedy = score(context, whole[len(context) :])
            assert float(answered[0]) == pytest.approx(total, abs=1e-3)
            assert (str(answered[1]) == "True") == greedy
            sums.append(total)
        right += int(np.argmax(sums)) == 0
    assert found["zorvia-choice"]["acc,none"] == pytest.approx(right / 40)
    total, words = 0.0, 0
    for sample in found["samples/zorvia-perplexity"]:
        passage = sample["doc"]["passage"]
        ids = tokenizer(passage, add_special_tokens=False).input_ids
        total += score([tokenizer.eos_token_id], ids)[0]
        words += len(passage.split())
    measured = found["zorvia-perplexity"]["word_perplexity,none"]
    assert measured == pytest.approx(np.exp(-total / words), rel=1e-3)
