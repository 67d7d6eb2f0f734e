"""What is chosen fits the memory, grows with it, and keeps to what was wished."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dovetail.ir.errors import CapacityError, RequestError, SpecError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.device_limits import (
    SEQUENCES,
    STEP_TOKENS,
    DeviceLimits,
    LimitOptions,
    device_limits,
)

MIB, GIB = 1 << 20, 1 << 30
EIGHT_B: dict[str, Any] = {
    "weights": 16 * 10**9,
    "block_bytes": 32 * 2 * 8 * 128 * 2 * KV_BLOCK,
    "row_bytes": 90_000,
    "logits_bytes": 3 * 128_256 * 4,
    "context": 8192,
}
"""A model of 8B parameters in bfloat16."""

SIZES = st.fixed_dictionaries(
    {
        "weights": st.integers(0, 1 << 20),
        "block_bytes": st.integers(1, 1 << 16),
        "row_bytes": st.integers(1, 1 << 14),
        "logits_bytes": st.integers(1, 1 << 16),
        "context": st.integers(1, 1 << 17),
        "utilization": st.floats(0.05, 1.0),
        "blocks": st.none() | st.integers(1, 100),
    }
)
FREE = st.integers(0, 1 << 24)


@st.composite
def asked(draw: st.DrawFn) -> LimitOptions:
    sequences = draw(st.none() | st.integers(1, 512))
    tokens = draw(st.none() | st.integers(sequences or 1, 1 << 14))
    return LimitOptions(max_num_seqs=sequences, max_num_batched_tokens=tokens)


def find(free: int, sizes: dict[str, Any], wished: LimitOptions) -> DeviceLimits | None:
    try:
        return device_limits(free=free, asked=wished, **sizes)
    except CapacityError:
        return None


def taken(sizes: dict[str, Any], found: DeviceLimits) -> int:
    """Return the bytes that all of it takes."""
    activations = found.step_tokens * sizes["row_bytes"] + found.sequences * sizes["logits_bytes"]
    return int(sizes["weights"] + activations + found.blocks * sizes["block_bytes"])


@given(FREE, SIZES, asked())
def test_what_is_chosen_fits_and_is_what_was_wished(
    free: int, sizes: dict[str, Any], wished: LimitOptions
) -> None:
    found = find(free, sizes, wished)
    assume(found is not None)
    assert found is not None
    assert taken(sizes, found) <= free * sizes["utilization"]
    assert 1 <= found.sequences <= found.step_tokens and found.blocks >= 1
    assert found.step_tokens == (wished.max_num_batched_tokens or found.step_tokens)
    assert found.sequences == (wished.max_num_seqs or found.sequences)
    assert found.blocks == (sizes["blocks"] or found.blocks)
    assert found.context == sizes["context"]


@given(FREE, st.integers(0, 1 << 16), SIZES, asked())
def test_more_memory_never_gives_less(
    free: int, more: int, sizes: dict[str, Any], wished: LimitOptions
) -> None:
    less, found = find(free, sizes, wished), find(free + more, sizes, wished)
    if less is not None:
        assert found is not None
        assert found.step_tokens >= less.step_tokens
        assert found.sequences >= less.sequences
        assert found.blocks >= less.blocks


@given(SIZES, asked())
def test_a_device_is_refused_only_where_the_least_does_not_fit(
    sizes: dict[str, Any], wished: LimitOptions
) -> None:
    rows = wished.max_num_seqs or 1
    tokens = wished.max_num_batched_tokens or rows
    least = DeviceLimits(step_tokens=tokens, sequences=rows, context=1, blocks=sizes["blocks"] or 1)
    needed = taken(sizes, least) + 16  # the unit of the division
    sizes["utilization"] = 1.0
    if find(needed, sizes, wished) is None:  # the shares are more than the least then
        assert find(2 * needed, sizes, wished) is not None


@pytest.mark.parametrize(
    ("free", "tokens", "sequences"),
    [(80 * GIB, STEP_TOKENS, SEQUENCES), (24 * GIB, range(2048, 8192), range(64, 257))],
)
def test_sizes_of_a_model_on_devices_that_people_have(
    free: int, tokens: int | range, sequences: int | range
) -> None:
    found = device_limits(free=free, **EIGHT_B)
    for value, wanted in ((found.step_tokens, tokens), (found.sequences, sequences)):
        assert value in wanted if isinstance(wanted, range) else value == wanted


def test_what_does_not_fit_is_told_with_figures() -> None:
    with pytest.raises(CapacityError, match=r"weights take 16000000000, .*raise gpu_memory_util"):
        device_limits(free=16 * GIB, **EIGHT_B)
    wished = LimitOptions(max_num_batched_tokens=100_000)
    with pytest.raises(CapacityError, match="a step of 100000 tokens 9000000000,"):
        device_limits(free=24 * GIB, asked=wished, **EIGHT_B)


def test_a_pool_is_no_larger_than_full_steps_of_full_contexts_use() -> None:
    found = device_limits(free=200 * GIB, **EIGHT_B | {"context": 40})
    assert found.blocks == SEQUENCES * 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_model_len": -1}, "max_model_len must be at least 1"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "each sequence has a token in a step"),
    ],
)
def test_impossible_wishes_are_refused(asked: dict[str, int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        LimitOptions(**asked)


def test_wishes_bound_what_an_artifact_holds_and_never_exceed_it() -> None:
    assert LimitOptions().bound(512, 64, 4096) == DeviceLimits(
        step_tokens=512, sequences=64, context=4096
    )
    few = LimitOptions(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=100)
    assert few.bound(512, 64, 4096) == DeviceLimits(step_tokens=32, sequences=2, context=100)
    assert LimitOptions(max_num_batched_tokens=8).bound(512, 64, 4096).sequences == 8
    for asked, said in (
        ({"max_num_seqs": 65}, "for .64.; lower it, or compile with max_step_sequences 65"),
        ({"max_num_batched_tokens": 513}, "compile with max_step_tokens 513"),
        ({"max_model_len": 4097}, "max_model_len 4097 is more .*compile with --max-context 4097"),
    ):
        with pytest.raises(SpecError, match=said):
            LimitOptions(**asked).bound(512, 64, 4096)
