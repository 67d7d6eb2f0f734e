"""How many elements each pointer of a bundled kernel must have, for checked calls from outside.

In: a kernel family and its binding. Out: per parameter a C expression over the names of the
kernel's integers, in double, so that no size a caller makes up overflows. `rows(n, stride, width)`
is what n rows span. What depends on values inside arrays (token ids, block tables, KV slots) is not
covered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dovetail.ir.block_format import BlockFormat
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL

ATTENTION = {
    "sinks": "n_q",
    "seq_starts": "n_prefill + 1",
    "seq_lengths": "n_prefill + n_decode",
    "block_tables": "rows(n_prefill + n_decode, table_stride, 1)",
    "partial": "n_decode * n_q * kv_splits * (hd + 16)",
}
PRODUCT = {
    "A": "rows(M, lda, K)",
    "C": "rows(M, ldc, N)",
}
LINEAR = {
    **PRODUCT,
    "B": "rows(ceil(N / 16), panel_stride, ceil(K / GROUP) * UNIT)",
    "bias": "N",
    "R": "rows(M, ldr, N)",
    "partial": "partial_size",
}
NORM = {"w": "H", "b": "H", "out": "rows(T, ldo, H)"}
ROWS = {"x": "rows(T, ldx, H)", "w": "H", "out": "rows(T, ldo, H)"}
EXTENTS: dict[str, dict[str, str]] = {
    "rmsnorm": ROWS,
    "rmsnorm_add": {**ROWS, "scale": "1"},
    "rmsnorm_parts": {"x": "rows(T, ldx, n * H)", "w": "H", "out": "rows(T, ldo, n * H)"},
    "gate_rows": {"x": "rows(T, ldx, H)", "y": "rows(T, ldy, H)"},
    "xielu_rows": {"x": "rows(T, ldx, H)", "w": "3"},
    "cap_rows": {"x": "rows(R, ldx, V)"},
    "scaled_add": ROWS,
    "norm_rows": {"x": "rows(T, ldx, H)", "w": "H"},
    "embed": {"ids": "T", "out": "rows(T, ldo, H)"},
    "embed_packed": {"ids": "T", "out": "rows(T, ldo, H)"},
    "gather_rows": {"rows": "R", "out": "rows(R, ldo, H)"},
    "route": {
        "choice": "E",
        "factors": "E",
        "logits": "rows(T, ldl, E)",
        "chosen": "T * k",
        "weights": "T * k",
    },
    "row_gate": {"gates": "rows(T, ldg, 1)", "x": "rows(T, ldx, H)"},
    "sort_experts": {
        "chosen": "T * k",
        "starts": "E + 1",
        "places": "T * k",
        "tokens": "T * k",
    },
    "expert_rows": {"tokens": "T * k", "out": "rows(T * k, ldo, H)"},
    "combine_experts": {
        "places": "T * k",
        "weights": "T * k",
        "R": "rows(T, ldr, H)",
        "out": "rows(T, ldo, H)",
    },
    "gemm_linear": LINEAR,
    "gemm_linear_reduce": LINEAR,
    "gemm_silu": {
        **PRODUCT,
        "B": "rows(2 * ceil(N / 16), panel_stride, ceil(K / GROUP) * UNIT)",
        "bias": "32 * ceil(N / 16)",
    },
    "rope_store": {
        "qkv": "rows(T, ldq, (n_q + 2 * n_kv) * hd)",
        "positions": "T",
        "q_norm": "hd",
        "k_norm": "hd",
        "kv_slots": "T",
    },
    "latent_store": {
        "q": "rows(T, ldq, n_q * (plain + rot))",
        "rows": "rows(T, ldr, (n_q + 1) * (rank + rot))",
        "positions": "T",
        "weights": "rank",
        "kv_slots": "T",
    },
    "prefill_attention": {
        "sinks": "n_q",
        "seq_starts": "n_prefill + 1",
        "seq_lengths": "n_prefill",
        "block_tables": "rows(n_prefill, table_stride, 1)",
    },
    "decode_attention": ATTENTION,
    "decode_attention_merge": ATTENTION,
    "decode_attention_rows": ATTENTION,
    "sample": {
        "logits": "rows(R, ldl, V)",
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "uniform"), "R"),
        **dict.fromkeys(("out_ids", "out_logprobs"), "R"),
        "scratch": "V * nth",
    },
    "layernorm": {**NORM, "x": "rows(T, ldx, H)"},
    "embed_sum": {**NORM, "ids": "T", "positions": "T", "types": "T"},
    "packed_attention": {
        "bias": "rows(n_q, 2 * span, 2 * span)",
        "seq_starts": "n_sequences + 1",
    },
    "rope_rows": {
        "qkv": "rows(T, ldq, (n_q + n_kv) * hd)",
        "positions": "T",
        "q_norm": "hd",
        "k_norm": "hd",
    },
    "mean_rows": {"seq_starts": "S + 1", "out": "rows(S, ldo, H)"},
    "unit_rows": {"x": "rows(R, ldx, H)", "out": "rows(R, ldo, H)"},
    "activate_rows": {"x": "rows(T, ldx, H)", "out": "rows(T, ldo, H)"},
    "ivf_scan": {"queries": "rows(Q, ldq, d)", "vectors": "n * d", "out": "rows(Q, ldo, n)"},
}
"""Family to parameter to least number of elements; users' own kernels have no entry."""

HEADS = (
    ("n_q", "n_kv >= 1 && n_q >= 1 && n_q % n_kv == 0", "be a multiple of n_kv, both at least 1"),
    ("hd", "hd >= 16 && hd <= 576 && hd % 16 == 0", "be a multiple of 16, at most 576"),
)
PROMPTS = (
    *HEADS,
    ("hd", "hd <= HEAD || (HEAD == 0 && hd <= 256)", "be at most what this kernel has room for"),
)
PAIRS = ("hd", "DOT == 0 || hd % 32 == 0", "be a multiple of 32, whose products are of pairs")
DECODES = (
    *HEADS,
    ("n_prefill", "n_prefill >= 0", "be at least 0"),  # rows and tables begin behind
    ("hd", "HD == 0 || hd == HD", "be what this kernel is made for"),
    ("n_q", "GROUP == 0 || n_q / n_kv == GROUP", "be n_kv times what this kernel is made for"),
)
SPLITS = (("kv_splits", "kv_splits >= 1", "be at least 1"),)
LIMITS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "route": (
        ("E", "E >= 1 && E <= 1024", "be at least 1, at most 1024"),
        ("k", "k >= 1 && k <= E", "be at least 1, at most E"),
        ("groups", "groups >= 1 && E % groups == 0", "divide E"),
        ("used", "used >= 1 && used <= groups", "be at least 1, at most groups"),
        ("k", "k <= E / groups * used", "be at most the experts of the groups used"),
    ),
    "latent_store": (
        ("rot", "rot >= 0 && rot % 2 == 0", "be even"),
        ("rank", "rank >= 1", "be at least 1"),
    ),
    "rope_store": (
        *HEADS,
        ("rot", "rot >= 0 && rot <= hd && rot % 2 == 0", "be even, at most hd"),
        ("span", "span >= rot && span <= hd && span % 2 == 0", "be even, at least rot, at most hd"),
    ),
    "prefill_attention": (*PROMPTS, PAIRS),
    "decode_attention": (*DECODES, *SPLITS),
    "decode_attention_merge": (*DECODES, *SPLITS),
    "decode_attention_rows": (*PROMPTS, *DECODES, PAIRS),
    "rope_rows": HEADS,
    "packed_attention": PROMPTS,
}
"""Family to (parameter, condition on integers and tunables, what the parameter must be)."""

MOST_SIZE, MOST_STRIDE, MOST_PARTS = (1 << 31) - 1, 1 << 48, 1 << 16
"""Most that sizes, strides and counts of parts may be: what a loop passes in time, or never adds up
to more than 63 bits."""
_LEAST = {"m_tile": -MOST_PARTS, "prefetch": -MOST_SIZE}
_PARTS = ("nth", "m_tile", "grid_m", "grid_n", "grid_k", "kv_splits")

FUNCTIONS = {"rows": "dt_ffi_rows", "ceil": "ceil"}
BLOCK_TUNABLES = ("BITS", "BLOCK", "NESTED", "MINIMUM")
_NAME = re.compile(r"[A-Za-z_]\w*")


def extents_in_c(
    family: str, binding: Mapping[str, int | str], slots: Mapping[str, str]
) -> dict[str, str]:
    """Return parameter -> the C expression of its least number of elements.

    slots: each parameter's place in C, of which integers are read as double.
    """
    found = EXTENTS.get(family, {})
    words = FUNCTIONS | (_unit(binding) if "B" in found else {})

    def place(match: re.Match[str]) -> str:
        name = match.group()
        return words.get(name) or f"(double){slots[name]}.i"

    return {name: _NAME.sub(place, text) for name, text in found.items() if name in slots}


def _unit(binding: Mapping[str, int | str]) -> dict[str, str]:
    """Return how many values of K lie together in a panel, and what elements these make there."""
    stored = str(binding["W"])
    if stored == "u8":
        bits, block, nested, minimum = (int(binding[name]) for name in BLOCK_TUNABLES)
        form = BlockFormat(bits, block, nested=bool(nested), minimum=bool(minimum))
        return {"GROUP": str(form.unit), "UNIT": str(form.unit_bytes)}
    group = FORMATS[stored].unit if stored in FORMATS else 1  # float16 lies as float32 does
    return {"GROUP": str(group), "UNIT": f"{group} * {PANEL}"}


def limits_in_c(
    family: str, binding: Mapping[str, int | str], slots: Mapping[str, str]
) -> tuple[tuple[str, str, str], ...]:
    """Return (parameter, C condition, what it must be) of the integers of a bundled kernel.

    A tunable that is not bound is 0.
    """

    def place(match: re.Match[str]) -> str:
        name = match.group()
        return f"{slots[name]}.i" if name in slots else str(binding.get(name, 0))

    return tuple(
        (name, _NAME.sub(place, condition), wanted)
        for name, condition, wanted in LIMITS.get(family, ())
    )


def range_of(name: str) -> tuple[int, int]:
    """Return the least and the most that an integer of a bundled kernel may be."""
    if name in _PARTS:
        return _LEAST.get(name, 0), MOST_PARTS
    strides = name.startswith("ld") or "stride" in name or "size" in name
    return _LEAST.get(name, 0), MOST_STRIDE if strides else MOST_SIZE
