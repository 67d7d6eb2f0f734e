"""Tapes: one model step as a flat array of kernel calls over planned buffers.

A tape is data. The compiler writes it as JSON; the runtime binds it to addresses and runs it with
one native call.
"""

from __future__ import annotations

import msgspec


class BufferRef(msgspec.Struct, frozen=True, kw_only=True, tag="buffer"):
    """Address of a planned buffer (bytes from the arena's start)."""

    name: str
    offset: int = 0  # bytes added to the buffer's start


class WeightRef(msgspec.Struct, frozen=True, kw_only=True, tag="weight"):
    """Address of a packed weight; None is passed as a null pointer."""

    name: str | None
    offset: int = 0  # bytes


class ArgRef(msgspec.Struct, frozen=True, kw_only=True, tag="arg"):
    """A value given at each run, by name; for a pointer, `offset` bytes are added."""

    name: str
    offset: int = 0


class IntConst(msgspec.Struct, frozen=True, kw_only=True, tag="int"):
    """An integer constant."""

    value: int


class FloatConst(msgspec.Struct, frozen=True, kw_only=True, tag="float"):
    """A floating constant, passed as a double."""

    value: float


class KvRef(msgspec.Struct, frozen=True, kw_only=True, tag="kv"):
    """Start of one layer in the K or V pool, by the pool bound at run time."""

    pool: str  # "k" or "v"
    layer: int


class StateRef(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Place in the state of a sequence: `offset` bytes from its start, of the first one of all."""

    offset: int


Slot = BufferRef | WeightRef | ArgRef | IntConst | FloatConst | KvRef | StateRef


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """A planned activation buffer: `offset` (64-byte aligned) and `bytes` in the tape's arena.

    Rows are `stride` elements apart: padded so that rows fall into different cache sets.
    """

    name: str
    dtype: str
    rows: int
    columns: int
    stride: int
    offset: int
    bytes: int


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of A in groups, each multiplied by a matrix of its own: the experts of a model.

    The matrices stand one after another in the weight, `bytes` apart, and their biases `bias_bytes`
    apart. `starts`: int32 [count + 1], where the rows of each begin. `each`: rows of A for each row
    of the entry's M.
    """

    count: int
    each: int
    starts: BufferRef
    bytes: int
    bias_bytes: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel call.

    `op` names a schedule table of the model; its row for M picks kernel and schedule values.
    `m` names the integer argument that is M. `skip_if_zero` names an integer argument.
    `barrier`: wait until all earlier entries are done before this one starts.
    `groups`: a product of several weights; its slots say N, K and strides of one.
    """

    op: str
    slots: tuple[Slot, ...]
    m: str
    barrier: bool = True
    skip_if_zero: str | None = None
    groups: Groups | None = None
    segment: str = ""  # e.g. "embed", "pre_attn(0)", "attn(0)", "post_attn(0)", "head"


class Tape(msgspec.Struct, frozen=True, kw_only=True):
    """`models/<name>/tapes/<tape>.json`."""

    schema: int = 1
    name: str
    args: tuple[str, ...]  # order of the values handed to dt_run
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    entries: tuple[Entry, ...]
    max_tokens: int
    max_sequences: int

    def segment(self, name: str) -> range:
        """Return the entries of segment `name`, which lie together."""
        places = [i for i, entry in enumerate(self.entries) if entry.segment == name]
        return range(places[0], places[-1] + 1) if places else range(0)


FORWARD_ARGS: tuple[str, ...] = (
    "n_tokens",  # T = prefill tokens then decode tokens
    "n_prefill",  # sequences with prefill tokens this step
    "n_decode",  # sequences with one decode token each
    "n_out",  # rows whose logits are wanted
    "token_ids",  # i32 [T]
    "positions",  # i32 [T]
    "kv_slots",  # i64 [T]: block * 16 + offset where the token's K and V go
    "seq_starts",  # i32 [n_prefill + 1]: first token row of each prefill sequence
    "seq_lengths",  # i32 [n_prefill + n_decode]: keys its last token sees
    "block_tables",  # i32 [n_prefill + n_decode][table_stride]
    "table_stride",  # blocks per row of block_tables
    "out_rows",  # i32 [n_out]: token rows whose logits are wanted
    "logits",  # f32 [n_out][vocab]: filled by the tape; rows `logits_stride` elements apart
    "logits_stride",
    "kv_splits",  # parts each decode sequence's keys are split into, >= 1
)
"""Arguments of every `forward` tape. Token rows: prefill sequences first, then decodes."""

STATE_ARGS: tuple[str, ...] = ("state_slots",)  # i32 [n_prefill + n_decode]: a sequence's state
"""Further ones of a model with recurrent layers."""

WHOLE = "forward_whole"
OUT_ARGS: tuple[str, ...] = (
    "out_positions",  # i32 [n_out]
    "out_lengths",  # i32 [n_out]: keys each of these rows sees
    "out_tables",  # i32 [n_out][table_stride]: the blocks of its sequence
)
"""Arguments of `forward` tapes whose last layers, which store no K and V, compute these rows alone.

Such a model has a tape `WHOLE`, too, of all rows in all layers, for devices.
"""

ADAPTED = "forward_adapted"
ADAPTER_ARGS: tuple[str, ...] = (
    "adapters",  # i32 [T]: which adapter's rows these are, from 1 on; 0 = none
    "out_adapters",  # i32 [n_out]: the same of these rows
)
"""Further arguments of the tape `ADAPTED`, for steps that have rows of adapters."""

GATED = "forward_gated"
"""The tape of steps of the phases in which a user's own kernel joins gates and ups."""

SAMPLE_ARGS: tuple[str, ...] = (
    "n_rows",
    "logits",  # f32 [n_rows][vocab]
    "logits_stride",
    "temperature",  # f32 [n_rows]; 0 = greedy
    "top_k",  # i32 [n_rows]; 0 = off
    "top_p",  # f32 [n_rows]; 1 = off
    "min_p",  # f32 [n_rows]; 0 = off
    "uniform",  # f32 [n_rows] in [0, 1)
    "out_ids",  # i32 [n_rows]
    "out_logprobs",  # f32 [n_rows]: log softmax of the raw logits at the chosen id
)
"""Arguments of the `sample` tape."""

ENCODE_ARGS: tuple[str, ...] = (
    "n_tokens",
    "n_sequences",
    "token_ids",  # i32 [n_tokens], the texts one after another
    "positions",  # i32 [n_tokens]: rows of the position table
    "type_ids",  # i32 [n_tokens]
    "seq_starts",  # i32 [n_sequences + 1]: first token row of each text
    "picked_rows",  # i32 [n_sequences]: the row that stands for a text, where one does
    "out",  # f32 [n_sequences][width]: filled by the tape
)
"""Arguments of an encoder's `encode` tape."""
