"""What a mixed load asks of a machine, and the division that `dovetail topo` shows for it."""

from __future__ import annotations

import pytest

from dovetail.compiler.plan.division import (
    EVEN,
    MIXES,
    SCANNED,
    Mix,
    bytes_scanned,
    demand_of,
    divide_load,
    read_mix,
)
from dovetail.ir.artifact import FileEntry
from dovetail.ir.errors import SpecError
from dovetail.ir.index_file import VECTORS, IndexManifest
from dovetail.topology.division import DECODE, ENCODERS, PREFILL, SEARCHES
from dovetail.topology.hardware import read_hardware
from dovetail.topology.presets import preset_model
from dovetail.topology.replay import DEFAULT_TRACE

TWO_SOCKETS = read_hardware("package:2 numa:1 core:24")
LLAMA = preset_model("tinyllama")


def test_demands_grow_with_the_requests_of_their_stage() -> None:
    def ask(chat: int, rag: int, embeddings: int) -> dict[str, float]:
        mix = Mix(chat, rag, embeddings)
        found = demand_of(TWO_SOCKETS, [LLAMA], None, DEFAULT_TRACE, mix)
        return {stage: demand.flops for stage, demand in found.items()}

    once = ask(1, 1, 1)
    assert all(ask(2, 2, 2)[stage] == 2 * once[stage] for stage in once)
    assert ask(1, 1, 2) == once | {ENCODERS: ask(1, 1, 2)[ENCODERS]}
    assert ask(1, 2, 1)[SEARCHES] == 2 * once[SEARCHES]
    chats = {stage for stage in once if ask(2, 1, 1)[stage] > once[stage]}
    assert chats == {PREFILL, DECODE}
    assert list(demand_of(TWO_SOCKETS, [], [], DEFAULT_TRACE, EVEN)) == [SEARCHES]


def test_a_mix_is_read_as_it_is_written() -> None:
    assert read_mix(None) == read_mix("1:1:1") == EVEN
    assert read_mix("16:0.5:0") == Mix(16, 0.5, 0)
    assert str(read_mix("16:0.5:0")).startswith("16:0.5:0 chats")
    no_numbers = ("inf:1:1", "nan:1:1", "1:nan:1", "1:1:nan", "1e308:1e308:1e308")
    for wrong in ("1:1", "1:1:1:1", "a:1:1", "-1:1:1", "0:0:0", *no_numbers):
        with pytest.raises(SpecError, match=f"--mix {wrong}"):
            read_mix(wrong)


@pytest.mark.parametrize("mix", ["1:0:0", "0:1:0", "0:0:1"])
def test_a_kind_alone_has_nearly_all_of_the_machine(mix: str) -> None:
    chosen, *_ = divide_load(TWO_SOCKETS, LLAMA, DEFAULT_TRACE, read_mix(mix))
    assert max(map(len, chosen.shares.values())) > 40


def test_searches_read_as_much_as_their_indexes_say() -> None:
    def index(bytes_: int, clusters: int) -> IndexManifest:
        files = {VECTORS: FileEntry(bytes=bytes_, sha256=None)}
        about = {"producer": "", "created": "", "documents": 1, "dim": 1, "codes": "flat"}
        return IndexManifest(**about, clusters=clusters, metric="l2", files=files)

    small, large = index(1 << 20, 16), index(1 << 30, 1024)
    assert bytes_scanned(small) == 1 << 20, "all of it"
    assert bytes_scanned(large) == 1 << 27, "an eighth of its clusters"
    assert EVEN.of([small, large]).scanned == ((1 << 20) + (1 << 27)) / 2
    assert EVEN.of([]).scanned == SCANNED
    asked = demand_of(TWO_SOCKETS, [LLAMA], None, DEFAULT_TRACE, EVEN.of([small]))
    assert asked[SEARCHES].read == 1 << 20


def test_a_machine_is_divided_by_its_load() -> None:
    chat, rag, embeddings = (divide_load(TWO_SOCKETS, LLAMA, DEFAULT_TRACE, mix) for mix in MIXES)
    for chosen, *_, everyone in (chat, rag, embeddings):
        assert chosen.seconds < everyone.seconds and everyone.busiest is None
        assert set(everyone.shares[DECODE]) == set(TWO_SOCKETS.allowed_pus)
    sizes = [{s: len(cpus) for s, cpus in found[0].shares.items()} for found in (chat, embeddings)]
    assert sizes[0][PREFILL] > 40 and sizes[1][ENCODERS] > 30
