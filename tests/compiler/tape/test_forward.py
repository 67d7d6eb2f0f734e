"""Tapes: entries of a step, their barriers, and buffers that never overlap while live."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.compiler.families.tensors import weight_sources
from dovetail.compiler.tape.buffers import Stage, live_sets, plan_offsets
from dovetail.compiler.tape.forward import build_forward_tape, build_sample_tape
from dovetail.compiler.tape.operators import OPERATORS
from dovetail.compiler.write.weights import plan_sources
from dovetail.ir.errors import ScheduleError
from dovetail.ir.model import ModelSpec, RopeSpec, WeightEntry
from dovetail.ir.schedule import Row, ScheduleTable
from dovetail.ir.tape import FORWARD_ARGS, OUT_ARGS, SAMPLE_ARGS, BufferRef, KvRef, Tape, WeightRef
from tests.tapes import table_key, tape_stages, verify_tape

replace = msgspec.structs.replace


def make_spec(**changes):
    spec = ModelSpec(
        family="llama", vocab_size=100, hidden_size=64, intermediate_size=120, n_layers=2,
        n_heads=4, n_kv_heads=2, head_dim=16, max_position=512, max_context=512, norm_eps=1e-6,
        rope=RopeSpec(rotary_dim=16), weight_dtype="f32", checkpoint_dtype="f32",
    )  # fmt: skip
    return replace(spec, **changes)


def plan_weights(spec: ModelSpec) -> tuple[WeightEntry, ...]:
    """Where the packed weights of a model go."""
    return plan_sources(weight_sources(spec), spec.weight_format)


def make_tape(spec, tokens=64, sequences=8):
    return build_forward_tape(spec, plan_weights(spec), tokens, sequences)


def slots(entry):
    names = [operand.name for operand in OPERATORS[entry.op]]
    return dict(zip(names, entry.slots, strict=True))


specs = st.builds(
    make_spec,
    hidden_size=st.integers(1, 300),
    intermediate_size=st.integers(1, 500),
    vocab_size=st.integers(1, 200),
    n_layers=st.integers(1, 3),
    attention_bias=st.booleans(),
    output_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
    tied_head=st.booleans(),
    weight_dtype=st.sampled_from(["f32", "bf16"]),
)


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(1, 300), st.integers(1, 40))
def test_any_model_gives_a_sound_tape(spec, tokens, sequences):
    weights = plan_weights(spec)
    tape = build_forward_tape(spec, weights, tokens, sequences)
    verify_tape(tape, weights)
    used = {s.name for e in tape.entries for s in e.slots if isinstance(s, WeightRef)}
    assert used - {None} == {entry.name for entry in weights}
    buffers = {b.name: b for b in tape.buffers}
    for live in live_sets(tape_stages(tape)):
        spans = sorted((buffers[n].offset, buffers[n].offset + buffers[n].bytes) for n in live)
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start
    assert tape.arena_bytes < sum(b.bytes + 64 for b in tape.buffers)
    assert msgspec.json.decode(msgspec.json.encode(tape), type=Tape) == tape


def test_one_layer_in_order():
    tape = make_tape(make_spec(n_layers=1))
    shown = [(e.op, e.segment, e.m, e.barrier, e.skip_if_zero) for e in tape.entries]
    pre, attn, post = "pre_attn(0)", "attn(0)", "post_attn(0)"
    assert shown == [
        ("embed", "embed", "n_tokens", False, None),
        ("rmsnorm", pre, "n_tokens", True, None),
        ("qkv", pre, "n_tokens", True, None),
        ("rope_store", pre, "n_tokens", True, None),
        ("prefill_attention", attn, "n_prefill", True, "n_prefill"),
        ("decode_attention", attn, "n_decode", False, "n_decode"),
        ("gather_rows", post, "n_out", False, None),
        ("gather_rows", post, "n_out", True, None),
        ("o", post, "n_out", True, None),
        ("rmsnorm", post, "n_out", True, None),
        ("gate_up", post, "n_out", True, None),
        ("down", post, "n_out", True, None),
        ("rmsnorm", "head", "n_out", True, None),
        ("head", "head", "n_out", True, None),
    ]
    assert tape.args == FORWARD_ARGS
    assert (tape.max_tokens, tape.max_sequences) == (64, 8)


def test_rows_without_logits_end_with_the_keys_and_values_of_the_last_layer():
    rows = {e.segment: e.m for e in make_tape(make_spec(n_layers=3)).entries if e.op == "down"}
    assert rows == {
        "post_attn(0)": "n_tokens",
        "post_attn(1)": "n_tokens",
        "post_attn(2)": "n_out",
    }


GEMMA4 = {
    "family": "gemma4",
    "n_layers": 4,
    "sliding_window": 32,
    "window_layers": (True, False, True, False),
    "qk_norm": True,
    "v_norm": True,
    "branch_norms": True,
    "tied_head": True,
    "layer_scale": True,
    "logits_cap": 30.0,
    "full_heads": (1, 32),
    "shared_kv": 2,
    "shared_inner": 240,
    "layer_inputs": 24,
}


@pytest.mark.parametrize("whole", [False, True])
def test_layers_that_share_keys_and_values_compute_rows_with_logits_alone(whole):
    spec = make_spec(**GEMMA4)
    weights = plan_weights(spec)
    tape = build_forward_tape(spec, weights, 64, 8, whole=whole)
    verify_tape(tape, weights)
    used = {s.name for e in tape.entries for s in e.slots if isinstance(s, WeightRef)}
    assert used - {None} == {entry.name for entry in weights}
    rows = [e.m for e in tape.entries if e.op == "down"]
    assert rows == ["n_tokens"] * (3 if whole else 2) + ["n_out"] * (1 if whole else 2)
    assert tape.args == (*FORWARD_ARGS, *OUT_ARGS)
    decodes = [slots(e) for e in tape.entries if e.op == "decode_attention"]
    assert [each["kpool"].layer for each in decodes] == [0, 1, 0, 1]
    assert [each["hd"].value for each in decodes] == [16, 32, 16, 32]
    lengths = [each["seq_lengths"].name for each in decodes]
    assert lengths == ["seq_lengths"] * 2 + ["seq_lengths" if whole else "out_lengths"] * 2
    stored = [slots(e)["n_kv"].value for e in tape.entries if e.op == "rope_store"]
    assert stored == [2, 1, 0, 0]


def test_slots_of_a_gemm_with_everything():
    spec = make_spec(attention_bias=True, output_bias=True, mlp_bias=True)
    entries = {e.op: slots(e) for e in make_tape(spec).entries if e.segment.endswith("(1)")}
    o = entries["o"]
    assert (o["N"].value, o["K"].value, o["panel_stride"].value) == (64, 64, 64 * 16)
    assert (o["B"].name, o["bias"].name) == ("layers.1.o", "layers.1.o_bias")
    assert o["R"] == o["C"] == BufferRef(name="picked")
    assert o["ldr"] == o["ldc"]
    assert entries["gate_up"]["N"].value == 120
    assert entries["gate_up"]["bias"].name == "layers.1.gate_up_bias"
    assert entries["down"]["K"].value == 120
    assert entries["rope_store"]["kpool"] == KvRef(pool="k", layer=1)
    assert entries["decode_attention"]["vpool"] == KvRef(pool="v", layer=1)
    assert entries["rope_store"]["q_norm"].name is None


def test_windows_follow_the_layer():
    spec = make_spec(sliding_window=32, window_layers=(False, True))
    windows = [
        slots(e)["window"].value for e in make_tape(spec).entries if e.op[-9:] == "attention"
    ]
    assert windows == [0, 0, 32, 32]


def test_tied_head_embeds_from_the_packed_head():
    entries = {e.op: slots(e) for e in make_tape(make_spec(tied_head=True)).entries}
    assert entries["embed"]["table"] == entries["head"]["B"] == WeightRef(name="head")


def test_rows_keep_out_of_each_others_cache_sets():
    tape = make_tape(make_spec(hidden_size=2048))
    strides = {b.name: b.stride for b in tape.buffers}
    assert strides["x"] == 2064
    assert strides["partial"] == 4 * 16 * 32  # kernels index this one themselves


def test_sample_tape():
    tape = build_sample_tape(make_spec(), 8)
    verify_tape(tape, ())
    (entry,) = tape.entries
    assert tape.args == SAMPLE_ARGS
    assert (entry.m, slots(entry)["V"].value) == ("n_rows", 100)
    assert tape.arena_bytes == -(-8 * 100 * 4 // 64) * 64


# ---- the verifier ----


def edit(tape, number, **changes):
    entries = list(tape.entries)
    entries[number] = replace(entries[number], **changes)
    return replace(tape, entries=tuple(entries))


def with_slot(tape, number, position, slot):
    changed = list(tape.entries[number].slots)
    changed[position] = slot
    return edit(tape, number, slots=tuple(changed))


def overlap(tape):
    return replace(tape, buffers=tuple(replace(b, offset=0) for b in tape.buffers))


FAULTS = {
    "unknown op": (lambda t: edit(t, 0, op="conv"), "unknown op"),
    "missing slot": (lambda t: edit(t, 0, slots=t.entries[0].slots[:-1]), "5 slots, not 6"),
    "bad argument": (lambda t: edit(t, 0, m="n_words"), "n_words"),
    "bad skip": (lambda t: edit(t, 4, skip_if_zero="none"), "none is no argument"),
    "no weight": (lambda t: with_slot(t, 0, 3, WeightRef(name="gone")), "no weight gone"),
    "null weight": (lambda t: with_slot(t, 0, 3, WeightRef(name=None)), "table cannot be"),
    "no buffer": (lambda t: with_slot(t, 0, 4, BufferRef(name="gone")), "no buffer gone"),
    "number for a pointer": (lambda t: with_slot(t, 0, 4, t.entries[0].slots[1]), "out cannot be"),
    "pointer for a number": (lambda t: with_slot(t, 0, 1, BufferRef(name="x")), "H cannot be"),
    "wrong shape": (
        lambda t: with_slot(t, 2, 5, WeightRef(name="layers.0.down")),
        "N, K = 128, 64",
    ),
    "overlap": (overlap, "overlap while both are live"),
    "outside": (lambda t: replace(t, arena_bytes=64), "leaves the arena"),
    "short buffer": (
        lambda t: replace(t, buffers=tuple(replace(b, rows=b.rows * 2) for b in t.buffers)),
        "smaller than its rows",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    change, message = FAULTS[fault]
    spec = make_spec(n_layers=1)
    with pytest.raises(ScheduleError, match=message):
        verify_tape(change(make_tape(spec)), plan_weights(spec))


def test_every_op_needs_its_table():
    spec = make_spec()
    tape, weights = make_tape(spec), plan_weights(spec)
    keys = {table_key(entry) for entry in tape.entries}
    assert ("qkv", 128, 64) in keys
    assert ("rmsnorm", 0, 0) in keys
    rows = (Row(m_lo=1, kernel="k", schedule=(0,) * 9),)
    tables = [
        ScheduleTable(
            target="generic", op=op, n=n, k=k, dtype="f32", phase="any", threads=1, rows=rows
        )
        for op, n, k in keys
    ]
    verify_tape(tape, weights, tables)
    without = [table for table in tables if table.op != "down"]
    with pytest.raises(ScheduleError, match="down"):
        verify_tape(tape, weights, without)


# ---- the planner alone ----

names = st.sampled_from("abcdefgh")
stages = st.lists(
    st.builds(Stage, st.frozensets(names, max_size=3), st.frozensets(names, max_size=3)),
    max_size=12,
)


@given(stages, st.lists(st.integers(1, 1000), min_size=8, max_size=8))
def test_live_buffers_never_overlap(steps, lengths):
    sizes = dict(zip("abcdefgh", lengths, strict=True))
    offsets, arena = plan_offsets(sizes, steps)
    assert all(offset % 64 == 0 for offset in offsets.values())
    assert all(offsets[name] + size <= arena for name, size in sizes.items())
    owner: dict[int, tuple[str, int]] = {}
    for number, stage in enumerate(steps):  # run it: nobody may find his bytes taken
        for name in stage.reads:
            written = [i for i in range(number) if name in steps[i].writes]
            if written:
                units = range(offsets[name], offsets[name] + sizes[name])
                assert all(owner[unit][0] == name for unit in units)
        for name in stage.writes:
            for unit in range(offsets[name], offsets[name] + sizes[name]):
                owner[unit] = (name, number)


def test_buffers_of_different_times_share_bytes():
    steps = [Stage(frozenset(), frozenset("a")), Stage(frozenset("a"), frozenset("b"))]
    steps += [Stage(frozenset("b"), frozenset("c"))]
    offsets, arena = plan_offsets({"a": 100, "b": 100, "c": 100}, steps)
    assert offsets["a"] == offsets["c"] != offsets["b"]
    assert arena == 256
