"""KV in a file: what comes back is what was kept, within its bounds, after restarts and damage."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.errors import RequestError
from dovetail.runtime.app import load
from dovetail.runtime.machine.kv_file import ENTRY, KvBlocks, KvFile
from dovetail.runtime.schedule.kv_pool import KvPool, hash_blocks
from tests.runtime.schedule.integrity import check_integrity

BLOCKS, EACH = 8, 32


def make_blocks() -> KvBlocks:
    sizes = [EACH, 0, 2 * EACH] * 2  # layers are of several sizes, and some have none
    return KvBlocks(tuple(np.zeros((BLOCKS, size), np.uint8) for size in sizes))


def room(slots: int) -> int:
    return slots * (make_blocks().block_bytes + ENTRY.itemsize)


def content(digest: bytes) -> np.ndarray:
    """Return what the model would compute for a block: it follows from all tokens before."""
    return np.frombuffer(random.Random(digest).randbytes(make_blocks().block_bytes), np.uint8)


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_finds_what_it_had_and_only_that(tmp_path: Path, seed: int) -> None:
    draw, found = random.Random(seed), 0
    starts = [[draw.randrange(9) for _ in range(33)] for _ in range(4)]
    for _restart in range(3):
        blocks = make_blocks()
        file = KvFile(tmp_path / "kv", "model", blocks, room(12))
        pool = KvPool(BLOCKS, keep=True)
        pool.file = file
        for number in range(60):
            tokens = [*draw.choice(starts), *(draw.randrange(3) for _ in range(20))]
            hashes = hash_blocks(tokens)
            before = len(pool._block_of.keys() & set(hashes))
            shared = pool.open(number, hashes)
            found += shared // 16 > before
            for digest, block in zip(hashes, pool.table(number), strict=False):
                assert np.array_equal(blocks.read(block), content(digest))
            pool.grow(number, len(tokens))
            pool.publish(number, tokens, len(tokens))
            for digest, block in zip(pool.hashes(number), pool.table(number), strict=False):
                blocks.write(block, content(digest))
            check_integrity(pool)
            pool.close(number)
            check_integrity(pool)
            assert len(file) <= 12
        file.close()
    assert found > 3, "the file was never of use"


def test_what_is_wanted_often_stays_and_other_models_find_nothing(tmp_path: Path) -> None:
    blocks, path = make_blocks(), tmp_path / "kv"
    names = [bytes([i]) * 15 + b"\0" for i in range(40)]
    file = KvFile(path, "model", blocks, room(4))
    for number, name in enumerate(names):
        file.save(name, 0)
        if number < 8:
            assert file.load(names[0], 1)
    assert file.holds(names[0]) and file.holds(names[-1]) and len(file) == 4
    with pytest.raises(RequestError, match="another process has it"):
        KvFile(path, "model", blocks, room(4))
    file.close()
    again = KvFile(path, "model", blocks, room(4))
    assert again.holds(names[0]) and len(again) == 4
    again._data[again._slot_of[names[0]]] ^= 1  # as a crash of the machine leaves it
    assert not again.load(names[0], 1) and not again.holds(names[0]) and len(again) == 3
    again.close()
    other = KvFile(path, "another model", blocks, room(4))
    assert len(other) == 0
    other.close()
    with pytest.raises(RequestError, match="kv_file_bytes is too small"):
        KvFile(path, "model", blocks, 10)
    with pytest.raises(RequestError, match=r"cannot store the KV cache .* lower kv_file_bytes"):
        KvFile(path, "model", blocks, 1 << 70)
    with pytest.raises(RequestError, match="cannot store the KV cache"):
        KvFile(path / "kv", "model", blocks, room(4))


def test_a_full_disk_is_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To write to a map where there is no room kills the process."""

    def fill(_file: int, _start: int, size: int) -> None:
        assert size > room(4)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(RequestError, match="No space left on device; name another file"):
        KvFile(tmp_path / "kv", "a", make_blocks(), room(4))
    assert not (tmp_path / "kv").exists()


def test_prompts_begin_where_an_app_before_has_been(
    make_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    path, prompt = make_artifact(), [i % 7 for i in range(20)]
    for cached in (0, 16):
        with load(path, kv_file=str(tmp_path / "kv"), kv_file_bytes=1 << 20) as app:
            (done,) = app.generate([prompt], max_tokens=4)
            assert done.metrics.cached_tokens == cached
    with load(path) as app:
        assert app.generate([prompt], max_tokens=4)[0].token_ids == done.token_ids
