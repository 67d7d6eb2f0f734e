"""What ranks are told: arrays of any step come out as they went in, and nothing more travels."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.accel.orders import (
    BatchOrder,
    BatchSizes,
    StepOrder,
    pack_arrays,
    unpack_arrays,
)
from dovetail.runtime.schedule.plan import Move

SHAPES = {
    "token_ids": (np.int32, (64,)),
    "positions": (np.int32, (64,)),
    "kv_slots": (np.int64, (64,)),
    "seq_starts": (np.int32, (17,)),
    "seq_lengths": (np.int32, (16,)),
    "block_tables": (np.int32, (16, 9)),
    "out_rows": (np.int32, (16,)),
}


@given(
    tokens=st.integers(0, 64),
    prefill=st.integers(0, 5),
    gpu=st.integers(0, 5),
    cpu=st.integers(0, 6),
    out=st.integers(0, 16),
    width=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_arrays_travel_as_far_as_they_are_used(
    tokens: int, prefill: int, gpu: int, cpu: int, out: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    full = {
        name: rng.integers(-(1 << 31), 1 << 31, shape).astype(dtype)
        for name, (dtype, shape) in SHAPES.items()
    }
    sizes = BatchSizes(
        n_tokens=tokens,
        n_prefill=prefill,
        gpu_decode=gpu,
        cpu_decode=cpu,
        n_out=out,
        cpu_splits=2,
    )
    filled = BatchOrder(
        sizes=sizes,
        arrays=pack_arrays(full, sizes, width),
        table_width=width,
        kv={"brought": b"", "sent": b"\1" * 8},
    )
    order = StepOrder(moves=(Move(3, (1, 2), (4, 5)),), leaving=1, batches=(filled,))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=StepOrder)
    assert back == order
    found = {name: np.full(shape, -7, dtype) for name, (dtype, shape) in SHAPES.items()}
    unpack_arrays(back.batches[0].arrays, found, back.batches[0].sizes, width)
    rows = prefill + gpu + cpu
    lengths = {"seq_starts": rows + 1, "seq_lengths": rows, "block_tables": rows, "out_rows": out}
    for name, array in full.items():
        wanted = np.full_like(array, -7)
        used: tuple[slice, ...] = (slice(lengths.get(name, tokens)),)
        if name == "block_tables":
            used += (slice(width),)
        wanted[used] = array[used]
        np.testing.assert_array_equal(found[name], wanted, name)
