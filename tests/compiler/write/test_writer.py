"""An artifact is written whole or not at all."""

import errno
import fcntl
import json
import os
import subprocess

import pytest

from dovetail.compiler.write.writer import sweep, write_artifact
from dovetail.ir.artifact import FORMAT_MAJOR, FileEntry, Manifest
from dovetail.ir.errors import ArtifactError, SpecError
from tests.full_disk import files_of_at_most

MANIFEST = {
    "producer": "test",
    "created": "now",
    "model_fingerprint": "m",
    "workload_fingerprint": "w",
    "targets": (),
    "models": (),
    "effort": "none",
}


def make(path, text=b"hello"):
    with write_artifact(path) as artifact:
        artifact.write_bytes("graph/a.txt", text)
        artifact.path_for("models/llm/weights/weights.bin").write_bytes(b"123")
        artifact.add_weights("models/llm/weights/weights.bin")
        artifact.commit(**MANIFEST)


def test_files_and_manifest(tmp_path):
    make(tmp_path / "app.dove")
    assert [p.name for p in tmp_path.iterdir()] == ["app.dove"]
    manifest = json.loads((tmp_path / "app.dove/manifest.json").read_text())
    weights = manifest["files"].pop("models/llm/weights/weights.bin")
    assert weights == {"bytes": 3, "sha256": None}
    ((name, entry),) = manifest["files"].items()
    assert (name, entry["bytes"]) == ("graph/a.txt", 5)
    assert len(entry["sha256"]) == 64
    assert (tmp_path / "app.dove").stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_older_artifact_is_replaced_at_the_end_only(tmp_path):
    path = tmp_path / "app.dove"
    make(path, b"old")
    (path / "stray").touch()
    with write_artifact(path) as artifact:
        artifact.write_bytes("graph/a.txt", b"new")
        assert (path / "graph/a.txt").read_bytes() == b"old"
        artifact.commit(**MANIFEST)
    assert (path / "graph/a.txt").read_bytes() == b"new"
    assert not (path / "stray").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["app.dove"]


def test_replacing_without_an_exchange_rename(tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail.compiler.write.writer.ctypes.CDLL", lambda *_, **__: object())
    make(tmp_path / "app.dove", b"old")
    make(tmp_path / "app.dove", b"new")
    assert (tmp_path / "app.dove/graph/a.txt").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["app.dove"]


def test_a_link_to_an_artifact_stays_a_link(tmp_path):
    make(tmp_path / "real.dove", b"old")
    (tmp_path / "app.dove").symlink_to("real.dove")
    make(tmp_path / "app.dove", b"new")
    assert (tmp_path / "app.dove").is_symlink()
    assert (tmp_path / "real.dove/graph/a.txt").read_bytes() == b"new"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SpecError("bad"), ZeroDivisionError])
@pytest.mark.parametrize("older", [True, False])
def test_any_failure_leaves_things_as_they_were(error, older, tmp_path):
    path = tmp_path / "app.dove"
    if older:
        make(path, b"old")
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind), write_artifact(path) as artifact:
        artifact.write_bytes("graph/a.txt", b"new")
        raise error
    assert [p.name for p in tmp_path.iterdir()] == ["app.dove"] * older
    assert not older or (path / "graph/a.txt").read_bytes() == b"old"


@pytest.mark.parametrize("kind", ["file", "empty directory", "other directory", "bad manifest"])
def test_other_things_are_not_replaced(kind, tmp_path):
    path = tmp_path / "app.dove"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
    if kind == "other directory":
        (path / "thesis.txt").write_text("mine")
    if kind == "bad manifest":
        (path / "manifest.json").write_text('{"format_major": "x"}')
    with pytest.raises(SpecError, match="is not an artifact"), write_artifact(path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["app.dove"]


@pytest.mark.parametrize("parent", ["/proc", "/sys"])
def test_output_that_cannot_be_written_to(parent):
    with pytest.raises(SpecError, match=f"cannot write to {parent}"), write_artifact(parent + "/a"):
        pass


def test_missing_parent(tmp_path):
    with pytest.raises(SpecError, match="cannot write"), write_artifact(tmp_path / "none/a.dove"):
        pass


def test_a_full_disk(tmp_path):
    wrong = r"cannot write .*app\.dove.*nothing was written"
    for size, left in ((None, []), (100, ["app.dove"])):
        if size:  # what is there stays
            make(tmp_path / "app.dove", bytes(size))
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with files_of_at_most(1000), pytest.raises(ArtifactError, match=wrong):
            make(tmp_path / "app.dove", bytes(5000))
        assert [path.name for path in tmp_path.iterdir()] == left
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_full_file_system(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with pytest.raises(ArtifactError, match=os.strerror(errno.ENOSPC)):
            make(tmp_path / "app.dove", bytes(1 << 20))
        assert not [*tmp_path.iterdir()]
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        with pytest.raises(SpecError, match=os.strerror(errno.EROFS)):
            make(tmp_path / "app.dove")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_link_is_shared_by_the_file_it_leads_to(tmp_path):
    """As in the cache of the hub, whose files are links to where the contents lie."""
    (tmp_path / "blob").write_bytes(b"123")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/weights").symlink_to("../blob")
    with write_artifact(tmp_path / "app.dove") as artifact:
        entry = FileEntry(bytes=3, sha256=None)
        artifact.link("deep/er/weights", tmp_path / "folder/weights", entry)
        artifact.commit(**MANIFEST)
    assert (tmp_path / "app.dove/deep/er/weights").read_bytes() == b"123"
    assert (tmp_path / "app.dove/deep/er/weights").samefile(tmp_path / "blob")


def test_what_a_killed_compile_left_is_swept(tmp_path):
    def leave(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
        return tmp_path / name

    left, other, busy = map(
        leave, (".app.dove.1.partial", ".b.dove.3.partial", ".app.dove.4.partial")
    )
    descriptor = os.open(busy, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        make(tmp_path / "app.dove")
        assert [left.exists(), other.exists(), busy.exists()] == [False, True, True]
        sweep(tmp_path)
        assert [other.exists(), busy.exists()] == [False, True]
    finally:
        os.close(descriptor)
    assert (tmp_path / "app.dove/manifest.json").exists()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Another compile begins between the two steps, and sweeps: nothing of this one is lost."""
    lock, swept = fcntl.flock, []

    def sweep_first(descriptor, kind):
        if not swept:
            swept.append(kind)
            sweep(tmp_path)
        lock(descriptor, kind)

    monkeypatch.setattr("dovetail.compiler.write.writer.fcntl.flock", sweep_first)
    make(tmp_path / "app.dove")
    assert swept and [p.name for p in tmp_path.iterdir()] == ["app.dove"]


def test_manifest_reads_back(tmp_path):
    import msgspec

    make(tmp_path / "app.dove")
    manifest = msgspec.json.decode(
        (tmp_path / "app.dove/manifest.json").read_bytes(), type=Manifest
    )
    assert manifest.format_major == FORMAT_MAJOR
    assert list(manifest.files) == sorted(manifest.files)
