"""Models by name, fetched from a hub on this machine: which files, from where, what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.compiler.models.hub import HubModel, name_model
from dovetail.tiny_world import ENCODER, LLAMA
from tests.hub import TOKEN, Hub, Repository, read_folder, run_hub

FIND = """
import json, sys
from dovetail.compiler.models.hub import find_model
from dovetail.errors import SpecError
found = []
for name in sys.argv[1:]:
    try:
        path = find_model(name)
        files = [path] if path.is_file() else path.rglob("*")
        assert all(file.read_bytes() for file in files if file.is_file())
        found.append(str(path))
    except SpecError as error:
        found.append("error: " + str(error))
print(json.dumps(found))
"""
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    files = read_folder(LLAMA)
    beside = {"README.md": b"#", "pytorch_model.bin": b"x", "original/params.json": b"{}"}
    beside |= {"onnx/model.onnx": b"x", "consolidated.safetensors": b"x"}
    kinds = (("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
    modules = [{"type": f"x.{kind}", "path": path} for kind, path in kinds]
    dense = {f"2_Dense/{n}": n.encode() for n in ("config.json", "model.safetensors")}
    dense["modules.json"] = json.dumps(modules).encode()
    tags = ("Q4_K_M", "UD-Q4_K_M", "Q8_0", "F32-00001-of-00002", "F32-00002-of-00002")
    named = {f"{tag[:3]}/tiny-{tag}.gguf": tag.encode() for tag in tags}
    other = {"config.json": b'{"architectures": ["FunnelModel"]}', "model.safetensors": b"x"}
    adapter = {"adapter_config.json": b'{"base_model_name_or_path": "tiny/llama"}'}
    adapter |= {"adapter_model.safetensors": b"x", "tokenizer.json": files["tokenizer.json"]}
    with run_hub(
        tiny__adapter=Repository(adapter | {"README.md": b"#", "optimizer.pt": b"x"}),
        tiny__llama=Repository({**files, **beside}, revisions=("main", "refs/pr/1")),
        tiny__encoder=Repository(read_folder(ENCODER) | beside),
        tiny__dense=Repository(read_folder(ENCODER) | dense | beside),
        tiny__shards=Repository(shard(files)),
        tiny__secret=Repository(files, gated=True),
        tiny__GGUF=Repository({**named, "mmproj-F16.gguf": b"x", "config.json": b"{}"}),
        tiny__one=Repository({"tiny.q8.gguf": b"q8"}),
        tiny__pickles=Repository({"config.json": files["config.json"], "model.bin": b"x"}),
        tiny__strange=Repository(other),
    ) as running:
        yield running


def shard(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return a model whose weights are said to be in two files, of three that are there."""
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"weight_map": names}).encode()
    rest = {name: data for name, data in files.items() if name in SMALL}
    weights = {name: name.encode() for name in (*names.values(), "model-00003-of-3.safetensors")}
    return {**rest, **weights, "model.safetensors.index.json": index}


def find(hub: Hub, home: Path, *names: str, **env: str) -> list[str]:
    """Return in a process of its own where each model is, or why not: its path from `home` on."""
    known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    command = [sys.executable, "-P", "-c", FIND, *names]
    env = {**inherited, **known, **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=home, check=False)
    assert done.returncode == 0, done.stderr
    return [text.removeprefix(f"{home}/hub/") for text in json.loads(done.stdout)]


def test_only_files_that_are_read_are_fetched_and_only_once(hub: Hub, tmp_path: Path) -> None:
    hub.take()
    pr = hub.repositories["tiny/llama"].commit("refs/pr/1")
    (path, again, other) = find(hub, tmp_path, *["tiny/llama"] * 2, "tiny/llama@refs/pr/1")
    assert path == again == "models--tiny--llama/snapshots/" + path.split("/")[-1]
    assert other == f"models--tiny--llama/snapshots/{pr}"
    weights = "model.safetensors"
    # the second revision has the same files, which the cache knows
    assert hub.take() == sorted(f"tiny/llama/{name}" for name in (*SMALL, weights))
    assert find(hub, tmp_path, "tiny/llama", HF_HUB_OFFLINE="1") == [path]
    assert find(hub, tmp_path, "tiny/llama", HF_ENDPOINT="http://127.0.0.1:1") == [path]
    find(hub, tmp_path, "tiny/encoder", "tiny/shards")
    encoder = read_folder(ENCODER)
    assert "1_Pooling/config.json" in encoder
    shards = {name for name in hub.repositories["tiny/shards"].files if "00003" not in name}
    wanted = [f"tiny/encoder/{n}" for n in encoder] + [f"tiny/shards/{n}" for n in shards]
    assert hub.take() == sorted(wanted)
    find(hub, tmp_path, "tiny/dense")
    assert {f"tiny/dense/2_Dense/{n}" for n in ("config.json", weights)} <= {*hub.take()}
    assert name_model(tmp_path / "hub" / path) == "tiny/llama"


def test_an_adapter_is_fetched_with_its_model(hub: Hub, tmp_path: Path) -> None:
    hub.take()
    (path,) = find(hub, tmp_path, "tiny/adapter")
    own = ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    wanted = [f"tiny/adapter/{name}" for name in own]
    wanted += [f"tiny/llama/{name}" for name in (*SMALL, "model.safetensors")]
    assert hub.take() == sorted(wanted)
    command = (
        "import sys; from pathlib import Path; "
        "from dovetail.compiler.models.merged_adapter import find_base; "
        "print(find_base(Path(sys.argv[1])))"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path)}
    folder = str(tmp_path / "hub" / path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, folder],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "models--tiny--llama/snapshots/" in done.stdout
    assert find(hub, tmp_path, "tiny/adapter", HF_HUB_OFFLINE="1") == [path]


def test_one_gguf_file_of_many(hub: Hub, tmp_path: Path) -> None:
    hub.take()
    asked = {
        "tiny/GGUF": "tiny/GGUF/Q4_/tiny-Q4_K_M.gguf",
        "tiny/GGUF:q8_0": "tiny/GGUF/Q8_/tiny-Q8_0.gguf",
        "tiny/GGUF/UD-/tiny-UD-Q4_K_M.gguf@main": "tiny/GGUF/UD-/tiny-UD-Q4_K_M.gguf",
        "tiny/GGUF:F32": "tiny/GGUF/F32/tiny-F32-00001-of-00002.gguf",
        "tiny/one": "tiny/one/tiny.q8.gguf",
    }
    found = find(hub, tmp_path, *asked)
    names = [path.removeprefix("models--").replace("--", "/").split("/") for path in found]
    assert ["/".join(parts[:2] + parts[4:]) for parts in names] == list(asked.values())
    assert hub.take() == sorted([*asked.values(), "tiny/GGUF/F32/tiny-F32-00002-of-00002.gguf"])
    there, away = find(hub, tmp_path, "tiny/GGUF:Q8_0", "tiny/GGUF:Q2", HF_HUB_OFFLINE="1")
    assert there == found[1] and "HF_HUB_OFFLINE forbids" in away


def test_what_cannot_be_fetched_is_told_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.take()
    said = {
        "tiny/none": f"no local path tiny/none, and no model at {hub.url}/tiny/none; check the na",
        "tiny/llama@v9": "tiny/llama has no revision v9",
        "tiny/secret": f"accept its conditions at {hub.url}/tiny/secret, then give a token that",
        "tiny/GGUF:Q2_K": "tiny/GGUF has no GGUF file Q2_K",
        "tiny/pickles": "tiny/pickles is not what Dovetail reads: a config.json with model.safete",
        "tiny/strange": "architecture FunnelModel is not supported",
        "tiny--x/llama": "it is no name of a model",
    }
    for text, part in zip(find(hub, tmp_path, *said), said.values(), strict=True):
        assert text.startswith("error: ") and part in text and "\n" not in text, text
    assert not any(name.endswith((".safetensors", ".gguf", ".bin")) for name in hub.take())
    offline = find(hub, tmp_path, "tiny/encoder", "tiny/pickles", HF_HUB_OFFLINE="1")
    assert all("HF_HUB_OFFLINE forbids; unset it" in text for text in offline), offline
    (away,) = find(hub, tmp_path, "tiny/encoder", HF_ENDPOINT="http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached (Connect" in away and "check the network" in away
    (path,) = find(hub, tmp_path, "tiny/secret", HF_TOKEN=TOKEN)
    assert path.startswith("models--tiny--secret/")


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name.v1-x@refs/pr/4", "org/name.v1-x", "refs/pr/4"),
        ("org/name:Q4_K_M@v1", "org/name:Q4_K_M", "v1"),
        ("org/name/a/b-Q8_0.gguf", "org/name/a/b-Q8_0", None),
    ],
)
def test_ids(text: str, name: str, revision: str | None) -> None:
    found = HubModel.read(text)
    assert found is not None and (found.name, found.revision) == (name, revision)
    assert name_model(text) == name


def test_what_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    paths = ("org/name", "./org/other", "/org/name", "name", "a/b/c", "a/b.gguf", "out/app.dove")
    assert [HubModel.read(text) for text in (*paths, Path("org/other"), "")] == [None] * 9
    assert name_model("org/name") == "name"
    snapshot = tmp_path / "models--org--a-b--c/snapshots/0123"
    assert name_model(snapshot) == "org/a-b--c"
    assert name_model(snapshot / "Q8/m-Q8_0-00001-of-00002.gguf") == "org/a-b--c/Q8/m-Q8_0"
