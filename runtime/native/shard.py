"""One rank's part of a model: which heads and columns it has, and the forward tape for them.

In: a model, its whole forward tape and the number of ranks. Out: a `Shard` and that rank's tape.
Weights are not copied: a shard is a view of the packed weight, from a panel or a row of K on. q, k,
v, gate, up and head are cut by columns; o and down by rows, and summed over the ranks (Megatron's
scheme: two sums a layer). With `whole_sums` they are cut by columns too, and what they read and
write is gathered: four gathers a layer, but each value is the sum that one process would make.
Where the phases have different numbers of ranks, KV lies in units of heads that each rank of either
has as a whole, `[unit][layer][block][kv_head][16][head_dim]`; a rank goes through it unit by unit.
A device holds a copy of its share alone (`shares.py`), and with `own_weights` its tape reads that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from msgspec.structs import replace

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS, cut_unit, inner_unit
from dovetail.ir.model import APART, MAX_KV_SPLITS, OWN_GATE, PANEL, ROWS, ModelSpec, WeightEntry
from dovetail.ir.tape import ArgRef, BufferRef, Entry, IntConst, KvRef, Slot, Tape, WeightRef
from dovetail.runtime.machine.abi import ALL_GATHER, ALL_REDUCE, COLLECTIVES

COMM = "comm"
"""The argument that a rank's tape has beside those of the whole one: its communicator."""

Slots = Callable[[str], tuple[str, ...]]
"""The names of an operator's operands, in order."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `ranks` computes: ranges of heads and of token ids.

    unit: between so many inner columns of an MLP or an expert ranks may be cut (`inner`).
    """

    rank: int
    ranks: int
    heads: range
    kv_heads: range
    vocab: range
    unit: int

    def inner(self, columns: int) -> range:
        """Return which of so many inner columns the rank has."""
        return _panels(columns, self.rank, self.ranks, self.unit)


def split_model(spec: ModelSpec, rank: int, ranks: int) -> Shard:
    """Return the part of one rank; ranges may differ by a head or a panel, where they start.

    With more ranks than KV heads each head is kept by several ranks, which share its query heads.

    Raises:
        SpecError: heads, panels or ranks do not go into one another.
    """
    if spec.adapters and ranks > 1:
        raise SpecError("a model with adapters beside it runs in one process; use one process")
    if spec.uneven and ranks > 1:
        raise SpecError(f"layers of {spec.family} cannot be shared by processes; use one process")
    group = spec.n_heads // spec.n_kv_heads
    if ranks > 1 and spec.qk_norm and spec.qk_norm_of == ROWS:
        raise SpecError(
            "queries and keys of this model are normed over all heads, which processes cannot "
            "share; use one process"
        )
    if ranks <= spec.n_kv_heads:
        kv_heads = _part(spec.n_kv_heads, rank, ranks)
        heads = range(kv_heads.start * group, kv_heads.stop * group)
    elif ranks % spec.n_kv_heads == 0 and spec.n_heads % ranks == 0:
        heads = _part(spec.n_heads, rank, ranks)
        kv_heads = range(heads.start // group, heads.start // group + 1)
    else:
        raise SpecError(
            f"{spec.n_heads} query and {spec.n_kv_heads} KV heads cannot be shared by {ranks} "
            f"processes; use at most {spec.n_kv_heads}, or a multiple that divides the query heads"
        )
    if spec.head_dim % PANEL:
        raise SpecError(
            f"heads of {spec.head_dim} values cannot be shared by processes, only multiples of "
            f"{PANEL}; use one process"
        )
    unit = inner_unit(spec)
    if ranks > min(-(-part.columns // unit) for part in spec.all_mlp_parts()):
        raise SpecError(f"{ranks} processes are more than the feed-forward layers have panels")
    if ranks > 1 and (len(heads) * spec.head_dim) % (values := cut_unit(spec, "o")):
        raise SpecError(
            f"with {ranks} processes blocks of {values} quantised weights would be cut: a process "
            f"has {len(heads)} heads of {spec.head_dim} values; use fewer processes"
        )
    vocab = _panels(spec.vocab_size, rank, ranks)
    return Shard(rank, ranks, heads, kv_heads, vocab, unit)


def kv_unit(spec: ModelSpec, numbers: Iterable[int]) -> int:
    """Return the KV heads of a unit that no rank parts, whichever of these numbers of ranks run."""
    shards = (split_model(spec, rank, ranks) for ranks in numbers for rank in range(ranks))
    return gcd(spec.n_kv_heads, *(shard.kv_heads.start for shard in shards))


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return the dimensions of one rank's part: its heads and inner columns."""
    experts = spec.experts
    return replace(
        spec,
        n_heads=len(shard.heads),
        n_kv_heads=len(shard.kv_heads),
        intermediate_size=len(shard.inner(spec.intermediate_size)),
        experts=experts
        and replace(
            experts,
            shared=len(shard.inner(experts.shared)),
            dense=len(shard.inner(experts.dense)),
        ),
    )


def shard_tape(
    tape: Tape,
    spec: ModelSpec,
    weights: Iterable[WeightEntry],
    slots: Slots,
    shard: Shard,
    *,
    whole_sums: bool = False,
    own_logits: bool = False,
    own_weights: bool = False,
    unit: int = 0,
) -> Tape:
    """Return the forward tape of one rank; all ranks must run theirs; it ends with a barrier.

    It writes its own columns of `logits`, which all ranks share, and takes the argument `comm`.
    With `own_logits` each rank has logits of its own, and the columns of the others are gathered.
    With `whole_sums` no sum over K is parted, so that any number of ranks gives the same bits.
    With `own_weights`, and parted sums, weights are what `shares.py` leaves of them.
    unit: KV heads in a unit of the pools, 0 = the pools are the rank's own.
    """
    if spec.experts and whole_sums and shard.ranks > 1:
        raise SpecError(
            "deterministic results are not possible with experts in several processes; use one "
            "process, or load without deterministic"
        )
    edits = _WHOLE_EDITS if whole_sums else _EDITS
    if own_weights:
        assert not whole_sums
        edits = _EDITS | {"qkv": _cut_qkv}
    if shard.ranks == 1:
        edits = {op: edits[op] for op in _OF_HEADS}
    index = {entry.name: entry for entry in weights}
    edited = [
        part
        for entry in tape.entries
        for part in edits.get(entry.op, _keep)(
            _Place(entry, spec, index, slots, shard, own_weights, unit, tape.max_sequences)
        )
    ]
    if shard.ranks == 1:
        return replace(tape, entries=tuple(edited))
    head = next(entry for entry in reversed(tape.entries) if entry.op == "head")
    if own_logits:
        columns = -(-spec.vocab_size // PANEL)
        barrier = _gather(
            _Place(head, spec, index, slots, shard), ("N", "C", "ldc"), columns, PANEL
        )
    else:
        last = next(entry for entry in reversed(edited) if entry.op in COLLECTIVES)
        barrier = _barrier(last, segment=edited[-1].segment)
    return replace(tape, args=(*tape.args, COMM), entries=(*edited, barrier))


def head_columns(spec: ModelSpec, shard: Shard) -> range:
    """Return the columns of attention that a rank's heads give, and `o` reads."""
    return range(shard.heads.start * spec.head_dim, shard.heads.stop * spec.head_dim)


def matrix_ranges(
    tape: Tape, weights: Iterable[WeightEntry], slots: Slots
) -> Iterator[tuple[int, int]]:
    """Yield (start, end) in weights.bin of all that the products of a tape read.

    Columns of a matrix lie together; of rows, each panel has a range of its own.
    """
    index = {entry.name: entry for entry in weights}
    for entry in tape.entries:
        if entry.op == ALL_REDUCE or "B" not in (names := slots(entry.op)):
            continue
        operands = dict(zip(names, entry.slots, strict=True))
        ref, sizes = operands["B"], (operands[name] for name in ("N", "K", "panel_stride"))
        n, k, stride = (size.value for size in sizes if isinstance(size, IntConst))
        assert isinstance(ref, WeightRef) and ref.name is not None
        weight = index[ref.name]
        panels = -(-n // PANEL) * (2 if weight.layout == "packed_pair" else 1)
        form, groups = FORMATS[weight.dtype], entry.groups
        length, step = form.panel_bytes(k), stride * form.dtype.size
        for group in range(groups.count if groups else 1):
            start = weight.offset + ref.offset + group * (groups.bytes if groups else 0)
            if length >= step:
                yield start, start + panels * step
            else:
                yield from ((at, at + length) for at in range(start, start + panels * step, step))


def _part(count: int, rank: int, ranks: int) -> range:
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def _panels(columns: int, rank: int, ranks: int, unit: int = PANEL) -> range:
    """Return the columns of a rank: whole panels or units of them, the last one perhaps cut."""
    units = _part(-(-columns // unit), rank, ranks)
    return range(min(units.start * unit, columns), min(units.stop * unit, columns))


# ---- one entry ----


@dataclass(frozen=True, slots=True)
class _Place:
    """An entry to be edited, and all it takes to do so."""

    entry: Entry
    spec: ModelSpec
    weights: Mapping[str, WeightEntry]
    slots: Slots
    shard: Shard
    own_weights: bool = False
    unit: int = 0
    sequences: int = 0

    @property
    def units(self) -> list[range]:
        """The KV heads of the rank, as many in each as lie together in the pools."""
        own = self.shard.kv_heads
        step = self.unit or len(own)
        return [range(first, first + step) for first in range(own.start, own.stop, step)]

    def pools(self, heads: range) -> dict[str, Slot]:
        """Return where K and V of a unit lie."""
        if not self.unit:
            return {}
        before = heads.start // self.unit * self.spec.n_layers
        pools = (name for name in ("kpool", "vpool") if name in self.slots(self.entry.op))
        found = {name: self.slot(name) for name in pools}
        return {n: replace(r, layer=r.layer + before) for n, r in found.items()
                if isinstance(r, KvRef)}  # fmt: skip

    def slot(self, name: str) -> Slot:
        """Return the slot of the operand `name`."""
        return self.entry.slots[self.slots(self.entry.op).index(name)]

    def inner(self, name: str) -> range:
        """Return the inner columns of the rank, of as many as the operand `name` says."""
        columns = self.slot(name)
        assert isinstance(columns, IntConst)
        return self.shard.inner(columns.value)

    def edit(self, **changes: Slot | int) -> Entry:
        """Return the entry with these operands changed."""
        names = self.slots(self.entry.op)
        slots = list(self.entry.slots)
        for name, value in changes.items():
            slots[names.index(name)] = IntConst(value=value) if isinstance(value, int) else value
        return replace(self.entry, slots=tuple(slots))

    def columns(self, first: int, planes: int = 1) -> WeightRef:
        """Return B from column `first` (a panel's first) on; `planes` panels stand for one."""
        weight = self._matrix()
        panel = FORMATS[weight.dtype].panel_bytes(weight.k)
        return self._cut(weight.name, first // PANEL * panel * planes)

    def once(self, *names: str) -> dict[str, Slot]:
        """Return these operands as null on all ranks but the first, which adds them."""
        return {} if self.shard.rank == 0 else dict.fromkeys(names, WeightRef(name=None))

    def rows(self, first: int) -> WeightRef:
        """Return B from row `first` of K on."""
        weight = self._matrix()
        return self._cut(weight.name, FORMATS[weight.dtype].row_bytes(first))

    def vector(self, name: str, first: int) -> WeightRef:
        """Return a weight that is a vector from element `first` on, or null as it was."""
        ref = self.slot(name)
        assert isinstance(ref, WeightRef)
        return ref if ref.name is None else self._cut(ref.name, ref.offset + first * _F32)

    def _cut(self, name: str, offset: int) -> WeightRef:
        return WeightRef(name=name, offset=0 if self.own_weights else offset)

    def weight_name(self) -> str:
        """Return the name of the weight of a product."""
        ref = self.slot("B")
        assert isinstance(ref, WeightRef) and ref.name is not None
        return ref.name

    def _matrix(self) -> WeightEntry:
        return self.weights[self.weight_name()]


_F32 = DTYPES["f32"].size


def _keep(place: _Place) -> Iterator[Entry]:
    yield place.entry


def _split_qkv(place: _Place) -> Iterator[Entry]:
    """Yield q, k and v as products of their own, side by side in the same buffer.

    They run together, so none may use the one buffer for partial sums of K.
    """
    spec, size = place.spec, place.spec.head_dim
    whole = (0, spec.n_heads, spec.n_heads + spec.n_kv_heads)  # where q, k and v begin
    part = place.weight_name().rpartition(".")[2]
    apart = part in _QKV  # they are weights of their own, each with an entry
    wanted = [piece for piece in _pieces(place) if not apart or piece[0] == _QKV.index(part)]
    for at, heads, before in wanted:
        first = (heads.start + (0 if apart else whole[at])) * size
        entry = place.edit(
            N=len(heads) * size,
            B=place.columns(first),
            bias=place.vector("bias", first),
            C=_shift(place.slot("C"), (before - (whole[at] if apart else 0)) * size),
            **({} if apart and len(wanted) == 1 else {"partial_size": 0}),
        )
        yield replace(entry, barrier=entry.barrier and (at, heads, before) == wanted[0])


_QKV = ("q", "k", "v")


def _pieces(place: _Place) -> Iterator[tuple[int, range, int]]:
    """Yield (q, k or v, heads, heads before them in a row) of a rank: all q, then unit by unit."""
    shard = place.shard
    yield 0, shard.heads, 0
    for unit in place.units:
        before = len(shard.heads) + 2 * (unit.start - shard.kv_heads.start)
        yield 1, unit, before
        yield 2, unit, before + len(unit)


def _cut_qkv(place: _Place) -> Iterator[Entry]:
    """Yield q, k and v as one product: rows of a share lie as those of the whole weight."""
    heads = len(place.shard.heads) + 2 * len(place.shard.kv_heads)
    yield place.edit(N=heads * place.spec.head_dim)


def _store_heads(place: _Place) -> Iterator[Entry]:
    """Yield the rotation of a rank's heads, or their store, of several units apart."""
    shard, row, size = place.shard, place.slot("qkv"), place.spec.head_dim
    if not place.unit:
        yield place.edit(n_q=len(shard.heads), n_kv=len(shard.kv_heads))
        return
    yield place.edit(n_q=len(shard.heads), n_kv=0)
    for at, unit, before in _pieces(place):
        if at == 1:
            there = {"qkv": _shift(row, before * size), **place.pools(unit)}
            yield replace(place.edit(n_q=0, n_kv=len(unit), **there), barrier=False)


def _cut_heads(place: _Place, column: int = 0) -> Iterator[Entry]:
    """Yield the attention of a rank's heads, unit by unit; `column`: where its output begins."""
    spec, shard, size = place.spec, place.shard, place.spec.head_dim
    group, first = spec.n_heads // spec.n_kv_heads, shard.heads.start
    for number, unit in enumerate(place.units):
        heads = range(max(first, unit.start * group), min(shard.heads.stop, unit.stop * group))
        before = heads.start - first
        moved = {"q": before * size, "out": column + before * size}
        if place.entry.op == "decode_attention":  # each unit has parts of its own to merge
            moved["partial"] = place.sequences * before * MAX_KV_SPLITS * (size + 16)
        there = {name: _shift(place.slot(name), by) for name, by in moved.items() if by}
        there["sinks"] = place.vector("sinks", heads.start)
        entry = place.edit(n_q=len(heads), n_kv=len(unit), **there, **place.pools(unit))
        yield replace(entry, barrier=entry.barrier and not number)


def _cut_gate_up(place: _Place, each: int = 1, **more: Slot) -> Iterator[Entry]:
    """Yield gates and ups of the inner columns of a rank; each: how often N counts these."""
    columns = place.slot("N")
    assert isinstance(columns, IntConst)
    inner = place.shard.inner(columns.value // each)
    part, bias = place.columns(inner.start, planes=2), place.vector("bias", 2 * inner.start)
    yield place.edit(N=each * len(inner), B=part, bias=bias, **more)


def _cut_up(place: _Place, **more: Slot) -> Iterator[Entry]:
    inner = place.inner("N")
    bias = place.vector("bias", inner.start)
    yield place.edit(N=len(inner), B=place.columns(inner.start), bias=bias, **more)


def _cut_inner(place: _Place, **more: Slot) -> Iterator[Entry]:
    """Yield what is done to inner columns, those of the rank."""
    yield place.edit(H=len(place.inner("H")), **more)


def _cut_rows(place: _Place, rows: range) -> Iterator[Entry]:
    """Yield a product over part of K, then the sum over ranks; rank 0 adds bias and residual.

    What experts give is summed when it has been combined.
    """
    yield place.edit(K=len(rows), B=place.rows(rows.start), **place.once("bias", "R"))
    if not place.entry.groups:
        yield _collect(place, ALL_REDUCE, ("M", "N", "C", "ldc"))


def _sum_experts(place: _Place) -> Iterator[Entry]:
    yield place.edit(**place.once("R"))
    yield _collect(place, ALL_REDUCE, ("T", "H", "out", "ldo"))


def _cut_head(place: _Place) -> Iterator[Entry]:
    vocab = place.shard.vocab
    logits = _shift(place.slot("C"), vocab.start)
    yield place.edit(N=len(vocab), B=place.columns(vocab.start), C=logits)


def _cap_head(place: _Place) -> Iterator[Entry]:
    vocab = place.shard.vocab
    yield place.edit(V=len(vocab), x=_shift(place.slot("x"), vocab.start))


_EDITS: dict[str, Callable[[_Place], Iterator[Entry]]] = {
    "qkv": _split_qkv,
    **dict.fromkeys(("rope_rows", "rope_store"), _store_heads),
    "prefill_attention": _cut_heads,
    "decode_attention": _cut_heads,
    "o": lambda place: _cut_rows(place, head_columns(place.spec, place.shard)),
    "gate_up": _cut_gate_up,
    "up": _cut_up,
    "xielu_rows": _cut_inner,
    "down": lambda place: _cut_rows(place, place.inner("K")),
    "dense_gate_up": _cut_gate_up,
    APART: lambda place: _cut_gate_up(place, 2),
    **dict.fromkeys(("gate_rows", OWN_GATE), _cut_inner),
    "dense_down": lambda place: _cut_rows(place, place.inner("K")),
    "combine_experts": _sum_experts,
    "head": _cut_head,
    "cap_rows": _cap_head,
}
_OF_HEADS = ("qkv", "rope_rows", "rope_store", "prefill_attention", "decode_attention")
"""What a rank that has all heads does unit by unit."""


# ---- whole sums ----


def _place_heads(place: _Place) -> Iterator[Entry]:
    """Yield the attention of a rank's heads, written where one process would."""
    return _cut_heads(place, head_columns(place.spec, place.shard).start)


def _gather_heads(place: _Place) -> Iterator[Entry]:
    spec, ranks = place.spec, place.shard.ranks
    units = spec.n_kv_heads if ranks <= spec.n_kv_heads else spec.n_heads
    yield from _cut_columns(place, units, spec.n_heads // units * spec.head_dim)


def _gather_inner(place: _Place) -> Iterator[Entry]:
    unit = place.shard.unit
    yield from _cut_columns(place, -(-place.spec.intermediate_size // unit), unit)


def _cut_columns(place: _Place, units: int, size: int) -> Iterator[Entry]:
    """Yield a product over all of K for some columns, between gathers of what it reads and writes.

    Each rank has written some of `units` units of `size` columns of A.
    """
    shard, hidden = place.shard, place.spec.hidden_size
    columns = _panels(hidden, shard.rank, shard.ranks)
    yield _gather(place, ("K", "A", "lda"), units, size)
    yield place.edit(
        N=len(columns),
        B=place.columns(columns.start),
        bias=place.vector("bias", columns.start),
        R=_shift(place.slot("R"), columns.start),
        C=_shift(place.slot("C"), columns.start),
        partial_size=0,
    )
    yield _gather(place, ("N", "C", "ldc"), -(-hidden // PANEL), PANEL)


def _gather(place: _Place, matrix: tuple[str, str, str], units: int, size: int) -> Entry:
    return _collect(place, ALL_GATHER, ("M", *matrix), IntConst(value=units), IntConst(value=size))


def _collect(place: _Place, op: str, matrix: tuple[str, str, str, str], *counts: Slot) -> Entry:
    """Return an operation of all ranks on a matrix: rows, columns, where it is, its stride."""
    slots = (ArgRef(name=COMM), *map(place.slot, matrix), *counts)
    return Entry(op=op, slots=slots, m=place.entry.m, segment=place.entry.segment)


def _shift(ref: Slot, elements: int) -> Slot:
    """Return a reference to float32 values so many elements on, null as it was."""
    if isinstance(ref, WeightRef) and ref.name is None:
        return ref
    assert isinstance(ref, BufferRef | ArgRef)
    return replace(ref, offset=ref.offset + elements * _F32)


_WHOLE_EDITS = {
    **_EDITS,
    "prefill_attention": _place_heads,
    "decode_attention": _place_heads,
    "o": _gather_heads,
    "gate_up": lambda p: _cut_gate_up(p, C=_shift(p.slot("C"), p.inner("N").start)),
    "up": lambda p: _cut_up(p, C=_shift(p.slot("C"), p.inner("N").start)),
    "xielu_rows": lambda p: _cut_inner(p, x=_shift(p.slot("x"), p.inner("H").start)),
    "down": _gather_inner,
}


# ---- the end of a step ----


def _barrier(entry: Entry, segment: str) -> Entry:
    """Return a sum of no columns, of the rows that `entry` is about: a barrier of all ranks."""
    comm, rows, _, x, stride = entry.slots[:5]
    slots = (comm, rows, IntConst(value=0), x, stride)
    return replace(entry, op=ALL_REDUCE, slots=slots, segment=segment)
