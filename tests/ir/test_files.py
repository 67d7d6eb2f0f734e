"""A file is exchanged whole or left as it was, and nothing stays beside it."""

import errno
import os
from pathlib import Path

import pytest

from dovetail.ir.files import write_whole


def test_a_file_is_exchanged_with_the_rights_of_a_new_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"a longer text")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]
    other = tmp_path / "b.json"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_file_keeps_its_mode(tmp_path):
    path = tmp_path / "a.json"
    path.touch()
    for mode in (0o600, 0o754):
        path.chmod(mode)
        write_whole(path, b"new")
        assert path.stat().st_mode & 0o777 == mode


def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    write_bytes = Path.write_bytes

    def fill_disk(part, data):
        write_bytes(part, data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

    monkeypatch.setattr(Path, "write_bytes", fill_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, b"new")
    assert caught.value.filename == str(path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"old"


def test_a_link_stays_one(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "b.json"
    path.write_bytes(b"old")
    link.symlink_to(path.name)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"new")
        assert os.read(reader, 16) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_pipe_without_a_name_is_written_to():
    """As /dev/stdout before a `|`, or a shell's `>(command)`."""
    reader, writer = os.pipe()
    try:
        write_whole(f"/dev/fd/{writer}", b"new")
        assert os.read(reader, 16) == b"new"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("folder", ["", "/"])
def test_a_folder_is_refused(tmp_path, folder):
    with pytest.raises(IsADirectoryError):
        write_whole(folder or tmp_path, b"new")
