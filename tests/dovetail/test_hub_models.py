"""Models of a hub from end to end: compiled, loaded, served and run by their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.tiny_world import ENCODER, LLAMA
from tests.dovetail.cli.test_idle_tuning import link_cache
from tests.gguf_files import add_tokenizer, save_gguf
from tests.hub import Repository, read_folder, run_hub
from tests.runtime.server.live import http, serving

QUESTION = (
    "Documents:\n- Melkar is the capital of Zorvia. Its people speak Zorvish.\n"
    "Question: What language is spoken in Zorvia?\nAnswer:"
)
ANSWER = "The language of Zorvia is Zorvish."
PYTHON = """
import sys
import dovetail
models = {"llm": "tiny/llama", "embedder": "tiny/encoder@main"}
dovetail.compile(models, output=sys.argv[1], effort="none")
with dovetail.load("tiny/GGUF:Q8_0") as app:
    message = {"role": "user", "content": sys.argv[2]}
    print(*app.artifact.path.parts[-3:-1], app.artifact.path.name.rpartition("-")[0])
    print(app.chat([message], max_tokens=24).message.content.strip())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of a machine with a hub, a cache of it, and a build cache with kernels alone."""
    folder = tmp_path_factory.mktemp("hub")
    gguf = save_gguf(folder / "m.gguf", LLAMA, "Q8_0", tokenizer=add_tokenizer(LLAMA))
    with run_hub(
        tiny__llama=Repository(read_folder(LLAMA)),
        tiny__encoder=Repository(read_folder(ENCODER)),
        tiny__GGUF=Repository({"tiny-Q8_0.gguf": gguf.read_bytes(), "tiny-F16.gguf": b""}),
    ) as hub:
        caches = {"HF_HOME": str(folder / "home"), "DOVETAIL_CACHE": str(link_cache(folder))}
        yield {"HF_ENDPOINT": hub.url, **caches}


def test_a_model_is_served_under_its_name_also_offline(
    environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with serving("tiny/llama@main", log=log, env=environment) as server:
        (model,) = http.get(f"{server.v1}/models").json()["data"]
        assert (
            model["id"] == "tiny/llama" == http.get(f"{server.v1}/models/tiny/llama").json()["id"]
        )
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        reply = http.post(f"{server.v1}/chat/completions", json={**body, "model": "tiny/llama"})
        assert reply.json()["choices"][0]["message"]["content"].strip() == ANSWER
    assert "compiling tiny/llama" in log.read_text()
    with serving("tiny/llama", log=log, env={**environment, "HF_HUB_OFFLINE": "1"}) as server:
        (model,) = http.get(f"{server.v1}/models").json()["data"]
        assert model["id"] == "tiny/llama"
    assert "compiling" not in log.read_text(), "the same files are compiled already"


def run(environment: dict[str, str], *command: object) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", *map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_taken_wherever_paths_are(environment: dict[str, str], tmp_path: Path) -> None:
    app, index = tmp_path / "app.dove", tmp_path / "idx"
    where, answer = run(environment, PYTHON, app, QUESTION).splitlines()
    assert (where, answer) == ("tiny GGUF tiny-Q8_0", ANSWER)
    assert json.loads((app / "manifest.json").read_text())["encoders"] == ["embedder"]
    pytest.importorskip("faiss")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "Melkar is the capital of Zorvia."}\n')
    main = "from dovetail.cli import main; main()"
    run(environment, main, "index", "build", corpus, "-o", index, "--embedder", "tiny/encoder")
    assert json.loads((index / "manifest.json").read_text())["embedder"]["name"] == "tiny/encoder"
    listed = json.loads(run(environment, main, "cache", "list", "--json"))["entries"]
    models = {entry["name"] for entry in listed if entry["kind"] == "models"}
    assert models >= {"tiny/encoder", "tiny/GGUF/tiny-Q8_0"}
    run(environment, main, "cache", "clear", "models", "--yes")
    assert list((Path(environment["DOVETAIL_CACHE"]) / "models").iterdir()) == []
