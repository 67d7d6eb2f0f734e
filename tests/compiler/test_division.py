"""What a mixed load asks of a machine, and the division that `dovetail topo` shows for it."""

from __future__ import annotations

from dovetail.compiler.division import EVEN, MIXES, Mix, demand_of, divide_load
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


def test_a_machine_is_divided_by_its_load() -> None:
    chat, rag, embeddings = (divide_load(TWO_SOCKETS, LLAMA, DEFAULT_TRACE, mix) for mix in MIXES)
    for chosen, *_, everyone in (chat, rag, embeddings):
        assert chosen.seconds < everyone.seconds and everyone.busiest is None
        assert set(everyone.shares[DECODE]) == set(TWO_SOCKETS.allowed_pus)
    sizes = [{s: len(cpus) for s, cpus in found[0].shares.items()} for found in (chat, embeddings)]
    assert sizes[0][PREFILL] > 40 and sizes[1][ENCODERS] > 30
