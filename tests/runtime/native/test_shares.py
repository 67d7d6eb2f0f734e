"""The shares of all ranks are the whole weights, and multiply to the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dovetail.compiler.tape.forward import build_forward_tape
from dovetail.runtime.native.shard import shard_tape, split_model
from dovetail.runtime.native.shares import WeightShare, weight_shares
from tests.compiler.tape.test_forward import make_spec, plan_weights
from tests.runtime.native.test_shard import EXPERTS, SHARED, slots

PRODUCTS = ("qkv", "o", "gate_up", "down", "dense_gate_up", "dense_down", "head")


@pytest.mark.parametrize("experts", [{}, EXPERTS, SHARED])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_all_of_each_weight_and_no_more(ranks: int, experts: dict[str, Any]) -> None:
    spec = make_spec(n_kv_heads=4, vocab_size=101, **experts)
    weights = plan_weights(spec)
    tape = build_forward_tape(spec, weights, 32, 4)
    counts = {w.name: np.zeros((w.n, w.k), int) for w in weights if w.layout.startswith("packed")}
    for rank in range(ranks):
        found = weight_shares(tape, spec, slots, split_model(spec, rank, ranks))
        parted = {name for name in counts if not name.endswith(".router")}
        assert parted <= set(found)
        for name, share in found.items():
            if name in counts:
                counts[name][share.rows, share.columns] += 1
    for name, count in counts.items():
        if name not in parted:
            continue
        assert (count == 1).all(), name


@pytest.mark.parametrize("experts", [{}, SHARED])
@pytest.mark.parametrize("ranks", [2, 4])
def test_products_of_a_tape_are_as_large_as_their_shares(
    ranks: int, experts: dict[str, Any]
) -> None:
    spec = make_spec(n_kv_heads=4, vocab_size=101, **experts)
    weights = plan_weights(spec)
    sizes = {weight.name: np.empty((weight.n, weight.k), np.int8) for weight in weights}
    tape = build_forward_tape(spec, weights, 32, 4)
    for rank in range(ranks):
        shard = split_model(spec, rank, ranks)
        shares = weight_shares(tape, spec, slots, shard)
        part = shard_tape(tape, spec, weights, slots, shard, own_logits=True, own_weights=True)
        for entry in part.entries:
            names = slots(entry.op) if entry.op in PRODUCTS and not entry.groups else ()
            operands = dict(zip(names, entry.slots, strict=True)) if names else {}
            if operands:
                name = operands["B"].name
                assert operands["B"].offset == 0
                share = shares.get(name, WeightShare())
                n, k = sizes[name][share.rows, share.columns].shape
                halves = 2 if entry.op.endswith("gate_up") else 1
                assert (n, k) == (operands["N"].value * halves, operands["K"].value)
