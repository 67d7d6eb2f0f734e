"""The kernel catalogue: the module of each family, its binding for a target, what a model needs.

Goes in: a ModelSpec and a target. Comes out: `KernelRequest`s, from which a library is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

from dovetail.codegen.isa.target import Target
from dovetail.ir.block_format import BlockFormat
from dovetail.ir.diagnostics import Source
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.encoder import EncoderSpec, Spec
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS, is_quantised
from dovetail.ir.high.nodes import Unit
from dovetail.ir.high.parse import parse_high
from dovetail.ir.model import DELTA, GATES, ROWS, SCAN, TURNED, XIELU, ModelSpec

Binding = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """Build `kernel` of the kernel module `module` with `binding` as the exported symbol `name`."""

    module: str
    kernel: str
    binding: Binding
    name: str


KERNELS: dict[str, str] = {
    "embed": "embed",
    "embed_packed": "embed",
    "gather_rows": "embed",
    "rmsnorm": "norm",
    "rmsnorm_add": "norm",
    "rmsnorm_parts": "norm",
    "norm_rows": "norm",
    "scaled_add": "norm",
    "route": "experts",
    "sort_experts": "experts",
    "expert_rows": "experts",
    "combine_experts": "experts",
    "row_gate": "experts",
    "conv_rows": "recurrent",
    "gated_conv_rows": "recurrent",
    "delta_rows": "recurrent",
    "scan_rows": "recurrent",
    "gated_norm": "recurrent",
    "sigmoid_rows": "recurrent",
    "gate_rows": "activation",
    "cap_rows": "activation",
    "xielu_rows": "activation",
    "gate_pairs": "activation",
    "adapter_in": "adapters",
    "adapter_out": "adapters",
    "rope_store": "rope",
    "latent_store": "rope",
    "prefill_attention": "attention_prefill",
    "decode_attention": "attention_decode",
    "decode_attention_merge": "attention_decode",
    "sample": "sample",
}
"""Family to kernel module: every kernel of a model but GEMM, whose binding the search chooses."""

STANDALONE: dict[str, str] = {
    "decode_attention_rows": "attention_prefill",
    "ivf_scan": "ivf",
    "embed_sum": "layernorm",
    "layernorm": "layernorm",
    "packed_attention": "attention_packed",
    "rope_rows": "rope",
    "mean_rows": "pool",
    "unit_rows": "pool",
    "activate_rows": "activation",
}
"""Families that no decoder's table names: of deterministic loads, retrieval, encoders."""

DTYPE_PARAMETER: dict[str, str] = {
    "embed": "W",
    "embed_packed": "W",
    "rope_store": "KV",
    "latent_store": "KV",
    "prefill_attention": "KV",
    "decode_attention": "KV",
    "decode_attention_merge": "KV",
    "decode_attention_rows": "KV",
    "ivf_scan": "METRIC",
    "embed_sum": "W",
    "activate_rows": "ACT",
    "gate_rows": "ACT",
    "gate_pairs": "ACT",
    "adapter_in": "W",
    "adapter_out": "W",
}
"""The tunable of a family that names its dtype, metric or function; it ends the kernel's name."""

_CPU_CHUNK = {"CHUNK": 128, "ROWS": 64}
_TILES: dict[tuple[str, str], dict[str, int]] = {
    ("prefill_attention", "avx512"): {"KT": 8, "RV": 1, "STRIPS": 6, "RT": 8, "DV": 2},
    ("prefill_attention", "avx2"): {"KT": 4, "RV": 2, "STRIPS": 6, "RT": 4, "DV": 2},
    ("prefill_attention", "neon"): {"KT": 4, "RV": 4, "STRIPS": 4, "RT": 4, "DV": 4},
    ("prefill_attention", "generic"): {"KT": 2, "RV": 4, "STRIPS": 8, "RT": 2, "DV": 4},
    ("decode_attention", "avx512"): {**_CPU_CHUNK, "KT": 4, "VT": 4, "DV": 4},
    ("decode_attention", "avx2"): {**_CPU_CHUNK, "HT": 2, "KT": 4, "VT": 2, "DV": 4},
    ("decode_attention", "neon"): {**_CPU_CHUNK, "KT": 4, "VT": 4, "DV": 4},
    ("decode_attention", "generic"): {**_CPU_CHUNK, "HT": 2, "VT": 2},
    ("ivf_scan", "avx512"): {"QT": 4, "NT": 1},  # one vector after the other: memory is read ahead
    ("ivf_scan", "avx2"): {"QT": 4, "NT": 1},
    ("ivf_scan", "neon"): {"QT": 4, "NT": 4},
}
TILES = _TILES | {
    (alike, isa): tiles
    for (family, isa), tiles in _TILES.items()
    if family == "prefill_attention"
    for alike in ("decode_attention_rows", "packed_attention")  # the first has the same bits
}
"""(family, instruction set) to tile sizes that fill the registers; others keep their defaults."""
PROMPTS = ("prefill_attention", "decode_attention_rows")
"""Families of attention of prompts, and of decodes with its bits."""
CAPPED = (*PROMPTS, "decode_attention")
"""Families that may cap scores."""


USUAL_HEAD, MOST_HEAD = 256, 576
"""The largest head_dim that attention of prompts has room for, and where there are larger ones."""
FIXED_HEAD_DIMS = (64, 80, 96, 128, 256)
"""head_dims that decode attention is unrolled for, as its tunable HD says."""
SHARED_ROWS = {"avx512": 4, "avx2": 2}
"""Instruction set to the most query heads that take a key together, where tiles are unrolled."""
STEP_BYTES = 8192
"""Keys between two updates of the maximum, without groups; with groups twice as many."""
FETCHES_AHEAD = frozenset({"x86-64-amx", "x86-64-avx512vnni", "x86-64-avx512"})
"""Targets, by name, of CPUs that fetch ahead on their own, within 4 KiB, what is read on and on.

They drop nothing they are asked for, keys beside values: asking again costs 4 to 10 %. Float32
groups take a block at a time, all heads of which lie together: measured with groups of 8 alone, on
one Xeon.
"""
LARGE_GROUP = 6
"""Query heads per KV head from which arithmetic in float32 is the limit, with vectors of 512 bits.

Whatever the KV dtype: 16 bits are widened. Those multiplied in pairs have tiles of their own.
"""

DOT_KEYS = 512
"""Keys of a sequence from which they are multiplied in pairs, where that is done."""
LEAST_DOT_GROUP = {"bf16": 3, "f16": 5}
"""KV dtype to query heads per KV head from which decode attention multiplies pairs, if it can."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What attention is specialised on: head_dim, and query heads per KV head.

    most: the largest head_dim, where layers have several; `head_dim` divides them all.
    rounded: whether the model's products round activations, to bfloat16 or int8, where the target
    does so: attention of prompts then rounds its own to bfloat16. cap: of scores, 0 = none.
    """

    head_dim: int
    group: int
    rounded: bool = False
    most: int = 0
    cap: int = 0


@lru_cache
def load_kernel_module(name: str) -> Unit:
    """Return the bundled kernel module `name`, the @inline functions of its imports in front.

    Raises SpecError if there is no such module, SyntaxDiagnostic if its text is wrong.
    """
    try:
        source = kernel_source(name)
    except KeyError:
        raise SpecError(f"there is no kernel module {name!r}") from None
    return resolve_imports(parse_high(source))


def kernel_source(name: str) -> Source:
    """Return the text of a bundled kernel module; KeyError if there is none."""
    path = files("dovetail.codegen") / "kernels" / f"{name}.dk"
    if not path.is_file():
        raise KeyError(name)
    return Source(path.name, path.read_text(encoding="utf-8"))


def resolve_imports(unit: Unit) -> Unit:
    """Return the unit with the @inline functions of the bundled modules it imports in front."""
    inlined = {
        function.name: function
        for module in unit.imports
        for function in load_kernel_module(module).functions
        if function.kind == "inline"
    }
    return replace(unit, functions=(*inlined.values(), *unit.functions), imports=())


def kernel_request(
    family: str, target: Target, dtype: str | None = None, heads: HeadShape | None = None
) -> KernelRequest:
    """Return the request for `family` with the target's tiles and, where it has one, a dtype.

    With `heads`, attention is made for them where that pays; without, it takes any.
    """
    binding: dict[str, int | str] = dict(TILES.get((family, target.isa), {}))
    module = KERNELS.get(family) or STANDALONE[family]
    if family not in DTYPE_PARAMETER:
        return KernelRequest(module, family, binding, family)
    assert dtype is not None, f"{family} needs a dtype"
    stored = DTYPE_PARAMETER[family]
    binding |= weight_binding(dtype) if stored == "W" else {stored: dtype}
    name, capped = f"{family}_{dtype}", ""
    if family in CAPPED and heads and heads.cap:
        binding, capped = binding | {"CAP": heads.cap}, f"_cap{heads.cap}"
    if family == "decode_attention" and heads and (tiles := fixed_tiles(target, dtype, heads)):
        name = f"{name}_{heads.head_dim}x{heads.group}{capped}"
        return KernelRequest(module, family, binding | tiles, name)
    if family in PROMPTS and heads and max(heads.head_dim, heads.most) > USUAL_HEAD:
        binding, name = binding | {"HEAD": MOST_HEAD}, f"{name}_wide"
    if family in PROMPTS and heads and pairs_prompts(target, heads):
        binding, name = binding | {"DOT": 1}, f"{name}_pairs"
    return KernelRequest(module, family, binding, name + capped)


def weight_binding(dtype: str) -> dict[str, int | str]:
    """Return the values of the tunables that tell a kernel the format of a weight."""
    form = FORMATS.get(dtype)
    return dict(form.binding) if isinstance(form, BlockFormat) else {"W": dtype}


def fixed_tiles(target: Target, dtype: str, heads: HeadShape) -> dict[str, int]:
    """Return the tiles of decode attention unrolled for `heads`; nothing where it is not.

    Memory limits small groups, which read keys as they lie, a few at a time; arithmetic limits
    large groups, 16 bits and short vectors: those load queries and update maxima less often.
    """
    if heads.most or heads.head_dim not in FIXED_HEAD_DIMS or target.isa not in SHARED_ROWS:
        return {}
    tiles = -(-heads.group // SHARED_ROWS[target.isa])
    rows = -(-heads.group // tiles)
    fetch = 1 if target.name in FETCHES_AHEAD else 2
    if multiplies_pairs(target, dtype, heads):
        shape = {
            "HD": heads.head_dim,
            "GROUP": heads.group,
            "DOT": DOT_KEYS,
            "BY_KEY": 0,
            "CHUNK": 64,
            "FETCH": fetch,
        }
        few = heads.group <= SHARED_ROWS[target.isa]
        return {**shape, "HT": rows, "KT": 4, "VT": rows if few else 8, "DV": 4 if few else 2}
    alone, wide, long = heads.group == 1, dtype == "f32", target.isa == "avx512"
    large = long and heads.group >= LARGE_GROUP
    step = (STEP_BYTES if alone else 2 * STEP_BYTES) // (heads.head_dim * DTYPES[dtype].size)
    if wide and not alone and target.name in FETCHES_AHEAD:
        step = 16
    return {
        **{"HD": heads.head_dim, "GROUP": heads.group, "HT": rows, "KT": 4, "FETCH": fetch},
        "VT": 8 if large else rows,
        "BY_KEY": int(alone or (wide and long and not large)),
        "CHUNK": max(n for n in (16, 32, 64, 128) if n <= max(step, 16)) if alone or wide else 128,
        "DV": 8 if alone else 2 if large or (wide and long) else 4,
    }


def multiplies_pairs(target: Target, dtype: str, heads: HeadShape) -> bool:
    """Return whether decode attention multiplies bfloat16 pairs, which rounds queries and weights.

    Only where arithmetic is the limit, and over DOT_KEYS keys or more, whose errors even out.
    """
    fits = target.bf16_dot and heads.head_dim % (2 * target.lanes) == 0
    return fits and heads.group >= LEAST_DOT_GROUP.get(dtype, math.inf)


def pairs_prompts(target: Target, heads: HeadShape) -> bool:
    """Return whether attention of prompts rounds what it multiplies to bfloat16, for its pairs."""
    return target.bf16_dot and heads.rounded and heads.head_dim % (2 * target.lanes) == 0


def model_kernels(spec: Spec, target: Target) -> tuple[KernelRequest, ...]:
    """Return everything but GEMM that the tapes of a model call."""
    if isinstance(spec, EncoderSpec):
        return _encoder_kernels(spec, target)
    used = {"rmsnorm_add": spec.branch_norms, "scaled_add": spec.branch_scale != 1.0}
    used |= dict.fromkeys(("rmsnorm_parts", "gate_rows"), bool(spec.layer_inputs))
    used["cap_rows"] = bool(spec.logits_cap)
    used["xielu_rows"] = spec.activation == XIELU
    used |= {f: spec.experts is not None for f, module in KERNELS.items() if module == "experts"}
    used["row_gate"] = spec.experts is not None and spec.experts.gated
    used["norm_rows"] = bool(spec.latent) or (spec.qk_norm and spec.qk_norm_of == ROWS)
    used["rmsnorm"] = not spec.layer_norm
    used |= {"rope_store": not spec.latent, "latent_store": bool(spec.latent)}
    used |= dict.fromkeys(("gate_pairs", "adapter_in", "adapter_out"), bool(spec.adapters))
    used |= _recurrent_kernels(spec)
    more = {
        "rope_rows": spec.qk_norm and spec.qk_norm_of == TURNED,
        "layernorm": spec.layer_norm,
    }
    families = [f for f in KERNELS if not f.startswith("embed") and used.get(f, True)]
    families += [family for family, needed in more.items() if needed]
    dtypes = {"KV": spec.kv_dtype, "ACT": spec.activation, "W": spec.adapter_dtype}
    heads = head_shape(spec)
    others = (
        kernel_request(family, target, dtypes.get(DTYPE_PARAMETER.get(family, "")), heads)
        for family in families
    )
    tables = {request.name: request for request in embed_kernels(spec, target).values()}
    return (*tables.values(), *others)


def embed_kernels(spec: ModelSpec, target: Target) -> dict[str, KernelRequest]:
    """Return what reads each table of embeddings, by its operator: in panels or row by row."""
    tables = {"embed": "head" if spec.tied_head else "embed"}
    if spec.layer_inputs:
        tables["embed_layers"] = "layer_embed"
    found = {}
    for op, table in tables.items():
        stored = spec.weight_format(table)
        packed = table == "head" or is_quantised(stored)
        found[op] = kernel_request("embed_packed" if packed else "embed", target, stored)
    return found


def _recurrent_kernels(spec: ModelSpec) -> dict[str, bool]:
    """Return which kernels of recurrent layers a model needs."""
    kernels = {
        GATES: ("gated_conv_rows",),
        DELTA: ("conv_rows", "delta_rows", "gated_norm"),
        SCAN: ("conv_rows", "scan_rows", "gated_norm"),
    }
    needed = kernels[spec.recurrent.rule] if spec.recurrent else ()
    used = {name: name in needed for names in kernels.values() for name in names}
    return used | {"sigmoid_rows": spec.output_gate}


def _encoder_kernels(spec: EncoderSpec, target: Target) -> tuple[KernelRequest, ...]:
    words, first = spec.weight_format("words"), ENCODER_FAMILIES[:2]
    if spec.decoder:
        words = spec.weight_format("embed")
        first = ("embed_packed" if is_quantised(words) else "embed", "rmsnorm", "rmsnorm_add")
    dtypes = {first[0]: words, "activate_rows": "tanh"}
    families = (*first, *ENCODER_FAMILIES[2:])
    return tuple(kernel_request(family, target, dtypes.get(family)) for family in families)


def retrieval_kernels(target: Target) -> tuple[KernelRequest, ...]:
    """Return the scans of an index's lists."""
    return tuple(kernel_request("ivf_scan", target, metric) for metric in ("l2", "ip"))


ENCODER_FAMILIES: tuple[str, ...] = (
    "embed_sum",
    "layernorm",
    "rope_rows",
    "packed_attention",
    "mean_rows",
    "gather_rows",
    "unit_rows",
    "activate_rows",
)
"""Everything but GEMM that the tapes of encoders call; layers of decoders lack the first two."""


def head_shape(spec: ModelSpec) -> HeadShape:
    """Return the shape that attention of a model is made for, which serves all its layers."""
    rounded = spec.weight_dtype == "bf16" or is_quantised(spec.weight_dtype)
    group, sizes = spec.n_heads // spec.n_kv_heads, [size for *_, size in spec.head_shapes]
    most = 0 if len(spec.head_shapes) == 1 else max(sizes)
    return HeadShape(math.gcd(*sizes), group, rounded, most, spec.attention_cap)


ROW_TYPES = ("f32", "bf16", "f16")
"""Types of activations on an accelerator; weights that are no integers have the same one."""


def device_kernels(formats: Iterable[str]) -> tuple[KernelRequest, ...]:
    """Return what an accelerator is given of models whose products have weights of `formats`.

    That are products of few rows: of row-major weights of every type of activations, to one of
    which those of a model are converted when they are loaded, and of each format of blocks.
    """
    blocks = sorted({name for name in formats if is_quantised(name)})
    merge = "gemm_skinny_merge"
    return (
        *(skinny_request(rows, rows) for rows in ROW_TYPES),
        *(skinny_request(form, rows) for form in blocks for rows in ROW_TYPES),
        *(
            KernelRequest("gemm_skinny", merge, {"X": rows}, f"{merge}_{rows}")
            for rows in ROW_TYPES
        ),
    )


def skinny_request(weights: str, rows: str) -> KernelRequest:
    """Return the request for products of few rows, of type `rows`, with weights of a format."""
    binding = weight_binding(weights) | {"X": rows}
    return KernelRequest("gemm_skinny", "gemm_skinny", binding, f"gemm_skinny_{weights}_{rows}")
