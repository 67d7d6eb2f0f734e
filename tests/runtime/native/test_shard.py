"""Which bytes of the packed weights a rank reads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dovetail.compiler.tape.forward import build_forward_tape
from dovetail.compiler.tape.operators import OPERATORS
from dovetail.compiler.write.weights import total_bytes
from dovetail.ir.errors import SpecError
from dovetail.ir.model import XIELU, ExpertSpec
from dovetail.runtime.native.shard import matrix_ranges, shard_tape, split_model
from dovetail.topology.configuration import allows_processes
from tests.compiler.tape.test_forward import make_spec, plan_weights

EXPERTS = {"experts": ExpertSpec(count=5, used=2), "intermediate_size": 112}
BESIDE = ExpertSpec(
    count=5, used=2, shared=72, gated=True, dense=200, dense_layers=(True, False, False)
)
SHARED = {"experts": BESIDE, "intermediate_size": 112, "n_layers": 3}
MODELS = [
    ("f32", {}),
    ("bf16", {}),
    ("f32", {"activation": XIELU}),
    ("f32", EXPERTS),
    ("f32", SHARED),
]


def slots(op: str) -> tuple[str, ...]:
    return tuple(operand.name for operand in OPERATORS[op])


def test_norms_over_all_heads_take_one_process():
    spec = make_spec(qk_norm=True, qk_norm_of="rows")
    assert split_model(spec, 0, 1).ranks == 1 and not allows_processes(spec, 2)
    with pytest.raises(SpecError, match="use one process"):
        split_model(spec, 0, 2)


@pytest.mark.parametrize(("dtype", "experts"), MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_read_every_matrix_once(ranks, dtype, experts):
    spec = make_spec(weight_dtype=dtype, n_kv_heads=4, vocab_size=101, **experts)
    weights = plan_weights(spec)
    tape = build_forward_tape(spec, weights, 32, 4)
    read = np.zeros(total_bytes(weights), np.int8)
    for rank in range(ranks):
        part = tape
        if ranks > 1:
            part = shard_tape(tape, spec, weights, slots, split_model(spec, rank, ranks))
        found = list(matrix_ranges(part, weights, slots))
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(found)))
        for start, end in found:
            read[start:end] += 1
    for weight in weights:
        wanted = weight.layout.startswith("packed")
        wanted = ranks if weight.name.endswith(".router") else wanted  # all choose alike
        assert (read[weight.offset : weight.offset + weight.bytes] == wanted).all(), weight.name
