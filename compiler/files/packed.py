"""Quantised checkpoints in safetensors: GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes.

In: a checkpoint whose config.json has a `quantization_config`. Out: the checkpoint with one tensor
for each matrix, `<name>.weight`, that reads its rows from the tensors it is stored in. Integers of
4 and 8 bits become blocks of our own, whose scales are repeated where groups are longer; values of
FP8 times their scales become bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dovetail.compiler.files.bitsandbytes import read_bytes, read_codes
from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo, map_tensor
from dovetail.compiler.files.config import Config
from dovetail.compiler.files.packed_rows import FLOATS, WORDS, Codes, PackedMatrix, ScaledRows, ones
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError

QUANTISED = "quantization_config"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, counted from the lowest, hold each of eight neighbouring columns."""
FP8_BLOCK = [128, 128]
"""Rows and columns of a block of FP8 that share a scale, unless config.json says otherwise."""


def _gptq(matrix: PackedMatrix) -> TensorInfo:
    """GPTQ: words along K; in its first format 1 was taken from every zero, with borrows."""
    stored, scales = matrix.part("qzeros", WORDS), matrix.part("scales", FLOATS)
    bits = matrix.bits(stored.shape[1], scales.shape[1])
    plus = 0 if _layout(matrix.config, "gptq") == "gptq_v2" else ones(bits)
    codes = Codes(matrix.part("qweight", WORDS), bits, turned=True)
    zeros = Codes(stored, bits, turned=True, across=True, plus=plus)
    used = None if zeros.uniform(1 << (bits - 1)) else zeros
    return matrix.info(codes, scales, used, places="g_idx")


def _awq(matrix: PackedMatrix) -> TensorInfo:
    """AWQ: words along N, in an order of their own."""
    main, scales = matrix.part("qweight", WORDS), matrix.part("scales", FLOATS)
    bits = matrix.bits(main.shape[1], scales.shape[1], (4,))
    codes = Codes(main, bits, turned=True, across=True, order=AWQ_ORDER)
    return matrix.info(codes, scales, replace(codes, info=matrix.part("qzeros", WORDS)))


def _packed_words(matrix: PackedMatrix) -> TensorInfo:
    """compressed-tensors, pack-quantized: words along K, scales row by row."""
    main, scales = matrix.part("weight_packed", WORDS), matrix.part("weight_scale", FLOATS)
    shape = map_tensor(matrix.any("weight_shape", ("i64", "i32"))).tolist()
    if not isinstance(shape, list) or len(shape) != 2 or shape[0] != main.shape[0]:
        raise matrix.fail(f"is {shape} in words of shape {list(main.shape)}")
    codes, zeros = Codes(main, matrix.bits(main.shape[1], shape[1])), None
    if "weight_zero_point" in matrix.parts:
        zeros = Codes(matrix.part("weight_zero_point", WORDS), codes.bits, across=True)
    return matrix.info(codes, scales, zeros, places="weight_g_idx")


def _bytes(matrix: PackedMatrix) -> TensorInfo:
    """int-quantized of compressed-tensors, and FP8: a value in each byte."""
    main, parts = matrix.part("weight", ("i8", "f8")), matrix.parts
    name = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    scales = matrix.any(name, FLOATS)
    if "weight_zero_point" in parts and map_tensor(parts["weight_zero_point"]).any():
        raise matrix.fail("has bytes and zero points, which is not supported")
    if main.dtype.name == "i8":
        return matrix.info(Codes(main, 8), matrix.part(name, FLOATS))
    for block in ((1, max(1, main.shape[1])), *_scaled_blocks(matrix.config)):
        if _fits(block, main, scales):
            rows = ScaledRows(main, scales, block)
            return replace(main, dtype=DTYPES["bf16"], kind="BF16", packed=rows)
    raise matrix.fail(f"of shape {list(main.shape)} has scales of shape {list(scales.shape)}")


def _scaled_blocks(config: Config) -> Iterator[tuple[int, int]]:
    """Yield the rows and columns of blocks of FP8 that share a scale, of every group of layers."""
    places = [(config, "weight_block_size")]
    if config.has("config_groups"):
        groups = config.section("config_groups")
        schemes = map(groups.section, groups.values)
        places = [(s.section("weights"), "block_structure") for s in schemes if s.has("weights")]
    for where, key in places:
        block = where.values.get(key) or FP8_BLOCK
        if not isinstance(block, list) or [type(size) for size in block] != [int, int]:
            raise where.fail(key, "but two integers are needed")
        yield max(1, block[0]), max(1, block[1])


def _fits(block: tuple[int, ...], main: TensorInfo, scales: TensorInfo) -> bool:
    """Tell whether scales are those of blocks of rows and columns, or of all of them."""
    counts = [-(-size // step) for size, step in zip(main.shape, block, strict=True)]
    shape = (*scales.shape, 1, 1)[: max(2, len(scales.shape))]
    return len(shape) == 2 and all(s in (1, c) for s, c in zip(shape, counts, strict=True))


_FORGOTTEN = ("q_scale", "k_scale", "v_scale")
"""What scales activations or KV in other engines: they are not rounded so here."""
_METHODS: dict[str, tuple[tuple[str, Callable[[PackedMatrix], TensorInfo]], ...]] = {
    "gptq": (("qweight", _gptq),),
    "awq": (("qweight", _awq),),
    "compressed-tensors": (("weight_packed", _packed_words), ("weight_scale", _bytes)),
    "fp8": (("weight_scale_inv", _bytes), ("weight_scale", _bytes)),
    "bitsandbytes": (
        *((f"quant_state.bitsandbytes__{book}", read_codes) for book in ("nf4", "fp4")),
        ("SCB", read_bytes),
    ),
    "mxfp4": (),  # of experts alone, whose tensors have names of their own (`experts.py`)
}
"""quant_method to the tensors that tell a quantised matrix, and how it is read."""
_LAYOUTS = {
    "gptq": ("gptq", "gptq_v2"),
    "awq": ("gemm",),
    "compressed-tensors": (
        *(f"{kind}-quantized" for kind in ("pack", "int", "float", "naive")),
        "mixed-precision",
    ),
}
"""quant_method to the layouts of it that are read, first the usual one."""
_LAYOUT_KEYS = ("checkpoint_format", "format", "version")
"""What methods call their layout, the surest first."""


def packed_tensors(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Return the checkpoint with the matrices of `quantization_config` as one tensor each.

    Raises SpecError for methods and layouts that are not read.
    """
    if not config.has(QUANTISED):
        if any(name.endswith(".qweight") for name in checkpoint.tensors):
            problem = "but tensors are quantised; take it from quantize_config.json"
            raise config.fail(QUANTISED, problem)
        return checkpoint
    section = config.section(QUANTISED)
    method = section.text("quant_method", "")
    method = section.text("packing_format", method).rpartition("auto_")[2]  # AutoRound's
    if method not in _METHODS:
        raise SpecError(
            f"{config.name}: quantization_config says {method!r}, which is not supported; "
            f"supported: {', '.join(_METHODS)}, and GGUF files"
        )
    if section.values.get("transform_config"):
        raise section.fail("transform_config", "but rotated weights are not supported")
    if method in _LAYOUTS:
        _layout(section, method)
    return replace(checkpoint, tensors={i.name: i for i in _merge(checkpoint, section, method)})


def _layout(config: Config, method: str) -> str:
    known = _LAYOUTS[method]
    key = next((key for key in _LAYOUT_KEYS if config.has(key)), _LAYOUT_KEYS[0])
    if (found := config.text(key, known[0]).lower()) not in known:
        raise config.fail(key, f"but of {method} only {', '.join(known)} is supported")
    return found


def _merge(checkpoint: Checkpoint, section: Config, method: str) -> Iterator[TensorInfo]:
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        stem, cut, part = name.partition(".weight.")  # as bitsandbytes names what belongs to one
        if not cut:
            stem, _, part = name.rpartition(".")
        if part not in _FORGOTTEN:
            grouped.setdefault(stem, {})[part] = info
    for stem, parts in grouped.items():
        read = next((read for part, read in _METHODS[method] if part in parts), None)
        if read is None:
            yield from parts.values()
            continue
        yield read(PackedMatrix(stem, parts, section))
        if "bias" in parts:
            yield parts["bias"]
