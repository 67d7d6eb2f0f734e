"""What the emulated GPU's kernels touch: the arguments of a launch go in, memory comes out.

KV is float32. Addresses are those of this process, so that sequence lengths and block tables can be
read when a kernel is about to run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.model import KV_BLOCK

Range = tuple[int, int]
"""First byte and the byte after the last."""


@dataclass
class Touch:
    """Memory that an act reads and writes."""

    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)


def operands_of(entry: KernelEntry, params: Any) -> dict[str, int]:
    """Return the integers and addresses of a launch by name."""
    names = [p for p in entry.params if p.kind != "thread"]
    return {
        param.name: ctypes.c_int64.from_address(address).value
        for param, address in zip(names, params, strict=True)
        if param.type != "f32"
    }


def _span(o: dict[str, int], base: str, count: int, stride: int, size: int = 4) -> Range:
    return o[base], o[base] + count * stride * size


def _ints(address: int, count: int, kind: type = ctypes.c_int32) -> list[int]:
    return list((kind * count).from_address(address))


def _block(o: dict[str, int], pool: str, block: int, size: int) -> Range:
    bytes_of = o["n_kv"] * KV_BLOCK * o["hd"] * size
    return o[pool] + block * bytes_of, o[pool] + (block + 1) * bytes_of


def _tables(o: dict[str, int], first: int, count: int) -> list[Range]:
    """Return the blocks of sequences, and the arguments that name them."""
    lengths = _ints(o["seq_lengths"] + 4 * first, count)
    found = [(o["seq_lengths"] + 4 * first, o["seq_lengths"] + 4 * (first + count))]
    for i, length in enumerate(lengths):
        table = o["block_tables"] + 4 * (first + i) * o["table_stride"]
        blocks = -(-length // KV_BLOCK)
        found.append((table, table + 4 * blocks))
        for block in _ints(table, blocks):
            found += [_block(o, pool, block, 4) for pool in ("kpool", "vpool")]
    return found


def _shift(o: dict[str, int], base: str, first: int, count: int, stride: str) -> Range:
    at = o[base] + first * o[stride] * 4
    return at, at + count * o[stride] * 4


def _copy_rows(rows: str, x: str | None, stride: str, ids: str) -> Callable[..., Touch]:
    def touch(o: dict[str, int]) -> Touch:
        reads = [_span(o, ids, o[rows], 1)]
        if x is not None:
            reads += [_shift(o, x, row, 1, stride) for row in _ints(o[ids], o[rows])]
        return Touch(reads, [_span(o, "out", o[rows], o["ldo"])])

    return touch


def _rope(o: dict[str, int]) -> Touch:
    rows = [_span(o, "qkv", o["T"], o["ldq"])]
    slots = _ints(o["kv_slots"], o["T"], ctypes.c_int64)
    stored = [_block(o, pool, slot // KV_BLOCK, 4) for slot in slots for pool in ("kpool", "vpool")]
    given = [_span(o, "positions", o["T"], 1), _span(o, "kv_slots", o["T"], 1, 8)]
    return Touch([*rows, *given], [*rows, *stored])


def _prefill(o: dict[str, int]) -> Touch:
    count = o["n_prefill"]
    rows = _ints(o["seq_starts"], count + 1)[-1]
    starts = _span(o, "seq_starts", count + 1, 1)
    reads = [starts, _span(o, "q", rows, o["ldq"]), *_tables(o, 0, count)]
    return Touch(reads, [_span(o, "out", rows, o["ldo"])])


def _first_decode(o: dict[str, int]) -> int:
    return _ints(o["seq_starts"], o["n_prefill"] + 1)[-1]


def _partial(o: dict[str, int]) -> Range:
    return _span(o, "partial", o["n_decode"], o["n_q"] * o["kv_splits"] * (o["hd"] + 16))


def _decode(o: dict[str, int]) -> Touch:
    first, count = _first_decode(o), o["n_decode"]
    reads = [_shift(o, "q", first, count, "ldq"), *_tables(o, o["n_prefill"], count)]
    return Touch([*reads, _span(o, "seq_starts", o["n_prefill"] + 1, 1)], [_partial(o)])


def _merge(o: dict[str, int]) -> Touch:
    first, count = _first_decode(o), o["n_decode"]
    return Touch([_partial(o)], [_shift(o, "out", first, count, "ldo")])


def _norm(o: dict[str, int]) -> Touch:
    return Touch([_span(o, "x", o["T"], o["ldx"])], [_span(o, "out", o["T"], o["ldo"])])


def _gate(o: dict[str, int]) -> Touch:
    gate = (o["gate"], o["gate"] + ((o["T"] - 1) * o["ldg"] + o["H"]) * 4)
    return Touch([gate], [_span(o, "out", o["T"], o["ldo"])])


def _rows_of(o: dict[str, int], base: str, columns: int, stride: str) -> list[Range]:
    """Return the first columns of M rows; none where there is no such matrix."""
    starts = (o[base] + row * o[stride] * 4 for row in range(o["M"] if o[base] else 0))
    return [(at, at + columns * 4) for at in starts]


def _skinny(o: dict[str, int]) -> Touch:
    n = o["N"]
    reads = [*_rows_of(o, "A", o["K"], "lda"), _span(o, "regions", o["n_regions"] * 7, 1, 8)]
    if o["splits"] > 1:
        return Touch(reads, [_span(o, "partial", o["splits"] * o["M"], n)])
    return Touch([*reads, *_rows_of(o, "R", n, "ldr")], _rows_of(o, "C", n, "ldc"))


def _skinny_merge(o: dict[str, int]) -> Touch:
    partial = _span(o, "partial", o["splits"] * o["M"], o["N"])
    residual = _rows_of(o, "R", o["N"], "ldr")
    return Touch([partial, *residual], _rows_of(o, "C", o["N"], "ldc"))


def _embed(o: dict[str, int]) -> Touch:
    given = [_span(o, name, o["T"], 1) for name in ("ids", "positions", "types")]
    return Touch(given, [_span(o, "out", o["T"], o["ldo"])])


def _rotate(o: dict[str, int]) -> Touch:
    rows = [_span(o, "qkv", o["T"], o["ldq"])]
    return Touch([*rows, _span(o, "positions", o["T"], 1)], rows)


def _of_sequences(rows: str, x: str, stride: str, out: str) -> Callable[..., Touch]:
    """Touch rows of `rows` texts by `seq_starts`; `out` counts what is written, "": all tokens."""

    def touch(o: dict[str, int]) -> Touch:
        tokens = _ints(o["seq_starts"], o[rows] + 1)[-1]
        reads = [_span(o, "seq_starts", o[rows] + 1, 1), _span(o, x, tokens, o[stride])]
        return Touch(reads, [_span(o, "out", o[out] if out else tokens, o["ldo"])])

    return touch


def _unit(o: dict[str, int]) -> Touch:
    return Touch([_span(o, "x", o["R"], o["ldx"])], [_span(o, "out", o["R"], o["ldo"])])


def _sample(o: dict[str, int]) -> Touch:
    rows = o["R"]
    asked = [_span(o, n, rows, 1) for n in ("temperature", "top_k", "top_p", "min_p", "uniform")]
    chosen = [_span(o, n, rows, 1) for n in ("out_ids", "out_logprobs")]
    scratch = _span(o, "scratch", rows, o["V"])
    return Touch([_span(o, "logits", rows, o["ldl"]), *asked], [*chosen, scratch])


TOUCHES: dict[str, Callable[[dict[str, int]], Touch]] = {
    "embed": _copy_rows("T", None, "", "ids"),
    "gather_rows": _copy_rows("R", "x", "ldx", "rows"),
    "rmsnorm": _norm,
    "rope_store": _rope,
    "prefill_attention_lanes": _prefill,
    "decode_attention": _decode,
    "decode_attention_merge": _merge,
    "gate_rows": _gate,
    "sample": _sample,
    "gemm_skinny": _skinny,
    "gemm_skinny_merge": _skinny_merge,
    "embed_sum": _embed,
    "layernorm": _norm,
    "activate_rows": _norm,
    "rope_rows": _rotate,
    "packed_attention_lanes": _of_sequences("n_sequences", "qkv", "ldq", ""),
    "mean_rows": _of_sequences("S", "x", "ldx", "S"),
    "unit_rows": _unit,
}
"""Kernel family to the memory that a launch touches."""
