"""Index folders: built, interrupted, built on, opened, damaged."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import msgspec
import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail.codegen.targets import host_target
from dovetail.compiler.stored import read_indexes, write_indexes
from dovetail.compiler.write import index_build
from dovetail.compiler.write.corpus import read_corpus, unread_kinds
from dovetail.compiler.write.index_build import (
    IndexReport,
    IndexRequest,
    build_index_folder,
    describe_embedder,
)
from dovetail.compiler.write.writer import write_artifact
from dovetail.ir.errors import ArtifactError, SpecError
from dovetail.ir.index_file import DOCUMENTS, OFFSETS, VECTORS, EmbedderEntry, Passage
from dovetail.runtime.index.manifest import MANIFEST, read_manifest
from dovetail.runtime.retrieval.folder import check_rest, left_over, open_index

DIM = 16
PASSAGES = [
    Passage(key=f"p{i}", title=f"t{i}" * (i % 2), text=f"word{i % 7} number {i}", metadata={"n": i})
    for i in range(60)
]
EMBEDDER = EmbedderEntry(name="words", fingerprint="1", query_prompt="q: ", passage_prompt="p: ")


@dataclass
class WordEncoder:
    """Sums a random vector for each word; `left`: passages until it fails like a kill would."""

    unit: bool = True
    left: int | None = None
    seen: list[str] = field(default_factory=list)

    def embed(self, texts: Sequence[str], /, *, prompt: str | None = None) -> np.ndarray:
        if self.left is not None and len(self.seen) + len(texts) > self.left:
            raise KeyboardInterrupt
        self.seen += texts
        rows = np.zeros((len(texts), DIM), np.float32)
        for row, text in enumerate(texts):
            for word in f"{prompt}{text}".split():
                rows[row] += np.random.default_rng(zlib.crc32(word.encode())).standard_normal(DIM)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) if self.unit else rows


def build(output: Path, encoder: WordEncoder, **options: object) -> IndexReport:
    request = IndexRequest(output=output, **options)
    return build_index_folder(PASSAGES, encoder, EMBEDDER, request, lambda *_: None)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_build, "SLICE", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "idx"
    report = build(path, WordEncoder(), clusters=4)
    assert (report.documents, report.clusters, report.metric, report.resumed) == (60, 4, "ip", 0)
    return path


def test_an_index_finds_its_passages_with_their_text(folder: Path) -> None:
    check_rest(folder, read_manifest(folder))
    opened = open_index(folder)
    assert opened.embedder == EMBEDDER
    assert [opened.store[id_] for id_ in range(len(opened))] == PASSAGES
    (query,) = WordEncoder().embed(["word3 number 10"], prompt="p: ")
    found = opened.find(query, 3, 4)
    assert found[0].text == "word3 number 10" and found[0].score == pytest.approx(1)
    assert found[0].metadata == {"n": 10, "key": "p10"}
    (only,) = opened.find(query, 3, 4, {"n": 12})
    assert only.id == 12
    titled = WordEncoder().embed(["t11: word4 number 11"], prompt="p: ")[0]
    assert opened.find(titled, 1, 4)[0].title == "t11"


@pytest.mark.parametrize("kill", [0, 8, 20, 59])
def test_an_interrupted_build_goes_on_where_it_was(folder: Path, tmp_path: Path, kill: int) -> None:
    first, second = WordEncoder(left=kill), WordEncoder()
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "idx", first, clusters=4)
    assert not (tmp_path / "idx").exists()
    partial = tmp_path / "idx.building" / "vectors.f32"
    if partial.exists():  # a kill may leave part of a vector
        partial.write_bytes(partial.read_bytes() + b"half")
    report = build(tmp_path / "idx", second, clusters=4)
    assert report.resumed == len(first.seen) == kill // 8 * 8
    assert len(second.seen) == 60 - report.resumed
    assert (tmp_path / "idx" / "vectors.faiss").read_bytes() == (
        folder / "vectors.faiss"
    ).read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["idx"]


def test_a_full_disk_leaves_only_what_a_build_can_go_on_from(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "nr_inodes=64,size=8k", "none", tmp_path]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        output, first, second = tmp_path / "idx", WordEncoder(), WordEncoder()
        ballast = tmp_path / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1024)):
                pass
        with pytest.raises(ArtifactError, match="No space left on device; nothing was written"):
            build(output, first)
        assert [path.name for path in tmp_path.iterdir()] == ["ballast"]
        ballast.unlink()
        with pytest.raises(ArtifactError, match=r"vectors of .* are kept in .*idx.building"):
            build(output, first)
        assert [path.name for path in tmp_path.iterdir()] == ["idx.building"]
        subprocess.run(["mount", "-o", "remount,size=1m", tmp_path], check=True)
        report = build(output, second)
        assert 0 < report.resumed == 60 - len(second.seen)
        assert [path.name for path in tmp_path.iterdir()] == ["idx"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_failed_build_without_vectors_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "idx", WordEncoder(left=0))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("left", [None, 40])
def test_an_index_among_the_files_of_its_corpus_is_none_of_them(
    tmp_path: Path, left: int | None
) -> None:
    (tmp_path / "a.txt").write_text("a note")
    with suppress(KeyboardInterrupt):
        build(tmp_path / "idx", WordEncoder(left=left))
    assert {path.name for path in tmp_path.iterdir()} > {"a.txt"}
    assert [passage.key for passage in read_corpus(tmp_path)] == ["a.txt:0"]
    assert not unread_kinds(tmp_path)


def test_another_corpus_or_embedder_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "idx", WordEncoder(left=20))
    other = msgspec.structs.replace(EMBEDDER, fingerprint="2")
    encoder, request = WordEncoder(unit=False), IndexRequest(output=tmp_path / "idx", clusters=1)
    report = build_index_folder(PASSAGES, encoder, other, request, lambda *_: None)
    assert (report.resumed, len(encoder.seen), report.metric) == (0, 60, "l2")


def test_a_build_in_the_place_of_an_index_embeds_only_what_is_new(tmp_path: Path) -> None:
    output, fresh = tmp_path / "idx", tmp_path / "fresh"
    build(output, WordEncoder(), clusters=4)
    renamed = msgspec.structs.replace(PASSAGES[1], key="other", metadata={"n": -1})
    new = [Passage(key=f"new{i}", text=f"new text {i}") for i in range(2)]
    changed = [renamed, new[0], *PASSAGES[3:40], PASSAGES[3], new[1]]
    changed[-2] = msgspec.structs.replace(PASSAGES[3], key="twin")

    def rebuild(output: Path, **options: object) -> tuple[list[str], IndexReport]:
        encoder, embedder = WordEncoder(), options.pop("embedder", EMBEDDER)
        request = IndexRequest(output=output, clusters=4, **options)
        report = build_index_folder(changed, encoder, embedder, request, lambda *_: None)
        return encoder.seen, report

    seen, report = rebuild(output)
    assert seen == ["new text 0", "new text 1"] and report.kept == len(changed) - 2
    assert rebuild(fresh)[1].kept == 0
    for name in (VECTORS, DOCUMENTS, OFFSETS):
        assert (output / name).read_bytes() == (fresh / name).read_bytes()
    other = msgspec.structs.replace(EMBEDDER, fingerprint="2")
    assert rebuild(fresh, embedder=other)[1].kept == 0  # vectors of another encoder
    assert rebuild(output, codes="sq8")[1].kept == len(changed)
    assert rebuild(output)[1].kept == 0  # what was rounded is no vector of the encoder
    (output / VECTORS).write_bytes(b"damaged")
    assert rebuild(output)[1].kept == 0


def test_two_builds_of_one_place_do_not_mix(tmp_path: Path) -> None:
    with (
        filelock.FileLock(tmp_path / "idx.building.lock"),
        pytest.raises(ArtifactError, match="another build"),
    ):
        build(tmp_path / "idx", WordEncoder())


def test_the_file_of_a_lock_goes_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another build could hold a lock that a third one does not see."""
    held, unlink = [], Path.unlink

    def watch(path: Path, **options: bool) -> None:
        if path.suffix == ".lock":
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(path.name)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", watch)
    build(tmp_path / "idx", WordEncoder())
    assert held == ["idx.building.lock"]
    assert [path.name for path in tmp_path.iterdir()] == ["idx"]


def test_what_is_no_index_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "manifest.json").write_text('{"format_major": 1, "files": {}}')
    encoder = WordEncoder()
    with pytest.raises(SpecError, match="is not an index"):
        build(tmp_path / "idx", encoder)
    assert not encoder.seen  # it says so before the work
    again = build(folder, WordEncoder(), clusters=4, codes="sq8")
    assert again.codes == open_index(folder).index.codes == "sq8"
    build(folder, WordEncoder(), clusters=4)


def test_a_seed_that_faiss_cannot_hold_is_refused_before_the_work(tmp_path: Path) -> None:
    encoder = WordEncoder()
    with pytest.raises(SpecError, match="the seed 2147483648 is too large"):
        build(tmp_path / "idx", encoder, seed=1 << 31)
    assert not encoder.seen


def test_an_encoder_that_overflows_is_refused(tmp_path: Path) -> None:
    encoder = WordEncoder(unit=False)
    rows = np.full((8, DIM), np.inf, np.float32)
    encoder.embed = lambda texts, /, *, prompt=None: rows  # type: ignore[method-assign]
    with pytest.raises(SpecError, match="not finite"):
        build(tmp_path / "idx", encoder)


def test_an_index_that_was_built_anew_during_a_compile_is_stored_whole(tmp_path: Path) -> None:
    build(tmp_path / "idx", WordEncoder())
    indexes = read_indexes([tmp_path / "idx"])
    build(tmp_path / "idx", WordEncoder(unit=False), codes="sq8")
    with write_artifact(tmp_path / "app") as artifact:
        write_indexes(artifact, indexes)
        for name, entry in artifact.files.items():
            data = (artifact.root / name).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.bytes, entry.sha256)


def test_kernels_lie_in_the_index(tmp_path: Path) -> None:
    target = host_target()
    build(tmp_path / "idx", WordEncoder(), target=target)
    manifest = read_manifest(tmp_path / "idx")
    assert manifest.targets == (target.name,)
    assert f"kernels/{target.name}/index.json" in manifest.files


def test_prompts_go_by_their_usual_names() -> None:
    prompts = {"document": "d: ", "query": "q: ", "clustering": "c: "}
    assert describe_embedder("m", "f", prompts, None) == EmbedderEntry(
        name="m", fingerprint="f", query_prompt="q: ", passage_prompt="d: "
    )
    asked = describe_embedder("m", "f", {"sts_query": "s: ", "web_search_query": "w: "}, None)
    assert (asked.query_prompt, asked.passage_prompt) == ("w: ", "")
    other = describe_embedder("m", "f", {"clustering": "c: "}, "clustering")
    assert other.query_prompt == other.passage_prompt == "c: "


def edit(folder: Path, **fields: object) -> None:
    path = folder / MANIFEST
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | fields))


def test_every_damage_is_named(folder: Path, tmp_path: Path) -> None:
    numbers = itertools.count()

    def copy() -> Path:
        target = tmp_path / str(next(numbers))
        target.mkdir()
        for file in folder.iterdir():
            if file.is_file():
                (target / file.name).write_bytes(file.read_bytes())
        return target

    def flip(name: str) -> Path:
        target = copy()
        data = bytearray((target / name).read_bytes())
        data[len(data) // 2] ^= 1
        (target / name).write_bytes(data)
        return target

    def cut(name: str) -> Path:
        target = copy()
        (target / name).write_bytes((target / name).read_bytes()[:-1])
        return target

    def told(**fields: object) -> Path:
        target = copy()
        edit(target, **fields)
        return target

    cases = [(tmp_path / "none", "is not an index"), (told(format_major=9), "of format 9")]
    cases += [(told(kind="artifact"), "is not the index format"), (told(dim="x"), "decoded")]
    cases += [(told(documents=61), "more or fewer documents"), (told(dim=8), "another kind")]
    cases += [(told(files={}), "lists no vectors.faiss")]
    deep = copy()
    (deep / MANIFEST).write_bytes(b'{"kind": ' + b"[" * 10**5 + b"]" * 10**5 + b"}")
    cases += [(deep, "is not an index")]
    for name in ("vectors.faiss", "documents.jsonl", "offsets.npy"):
        cases += [(flip(name), "does not have the sha256"), (cut(name), "bytes where")]
    for path, said in cases:
        with pytest.raises(ArtifactError, match=said):
            open_index(path)
    assert len(open_index(copy()).index) == 60


def test_the_smallest_files_are_hashed_at_load_and_the_rest_by_and_by(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(folder, tmp_path / "idx")
    sizes = {name: (copy / name).stat().st_size for name in (VECTORS, DOCUMENTS, OFFSETS)}
    largest = max(sizes, key=lambda name: sizes[name])
    monkeypatch.setattr("dovetail.runtime.retrieval.folder.HASHED_AT_ONCE", sizes[largest])
    assert largest in left_over(read_manifest(copy))
    check_rest(copy, read_manifest(copy))
    data = bytearray((copy / largest).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / largest).write_bytes(data)
    open_index(copy)
    manifest = read_manifest(copy)
    with pytest.raises(ArtifactError, match=f"{largest}: does not have the sha256"):
        check_rest(copy, manifest)
    again = msgspec.structs.replace(manifest, created="later")
    (copy / MANIFEST).write_bytes(msgspec.json.encode(again))
    check_rest(copy, manifest)  # the file is that of another index, and not damaged


def test_long_passages_are_found_part_by_part_and_a_large_index_knows_when_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_build, "QUERIES", 20)
    monkeypatch.setattr("dovetail.runtime.index.cursor.LEAST_PROBES", 16)

    def cut(text: str, before: str) -> list[str]:
        assert before.startswith("p: ")
        return text.split(" number ")

    report = build(tmp_path / "idx", WordEncoder(), clusters=30, cut=cut)
    assert report.divided == 60 and report.documents == 120
    opened = open_index(tmp_path / "idx")
    assert opened.store.find("p3") == (6, 7) and opened.store[7].text == "3"
    assert {end.nprobe for end in read_manifest(tmp_path / "idx").early} <= {16, 30}
    opened.change(remove=["p3"])
    assert len(opened.index) == 118
    assert not read_manifest(build_whole(tmp_path / "whole")).early


def build_whole(path: Path) -> Path:
    build(path, WordEncoder(), clusters=16)
    return path
