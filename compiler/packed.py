"""Quantised checkpoints in safetensors: GPTQ, AWQ, compressed-tensors and FP8.

In: a checkpoint whose config.json has a `quantization_config`. Out: the checkpoint with one tensor
for each matrix, `<name>.weight`, that reads its rows from the tensors it is stored in. Integers of
4 and 8 bits become blocks of our own, whose scales are repeated where groups are longer; values of
FP8 times their scales become bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.checkpoint import Checkpoint, TensorInfo, map_tensor
from dovetail.compiler.config import Config
from dovetail.ir.block_format import GROUP, BlockFormat, Blocks
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS

Array = npt.NDArray[Any]
Parts = Mapping[str, TensorInfo]
"""Tensors of a matrix by what follows its name."""

QUANTISED = "quantization_config"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns each four bits of a word hold, from the lowest on."""
FP8_BLOCK = (128, 128)
"""Rows and columns of a block of FP8 that share a scale, unless config.json says otherwise."""
_FORGOTTEN = ("input_scale", "k_scale", "v_scale", "q_scale", "output_scale")
"""What scales activations or KV in other engines: these are not rounded so here."""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of integers: value = scale (code - zero), of groups of K.

    codes, scales, zeros: (first row, last row) -> uint8 [n][k], float32 [n][groups], and uint8
    [n][groups], or None where every zero is half of the codes. below: how much too low zeros are.
    """

    form: BlockFormat
    k: int
    codes: Callable[[int, int], Array]
    scales: Callable[[int, int], Array]
    zeros: Callable[[int, int], Array] | None = None
    below: int = 0

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows [first, last) as codes and float16 scales of `form`."""
        codes, scales = self.codes(first, last), self.scales(first, last)
        if self.form.bits == 8:
            codes = codes ^ np.uint8(128)  # bytes with a sign
        minimums = None
        if self.zeros is not None:
            minimums = self._repeat(-scales * (self.zeros(first, last) + np.float32(self.below)))
        return Blocks(codes, self._repeat(scales), minimums)

    def values(self, first: int, last: int) -> Array:
        """Return the same rows as float32."""
        return self.form.values(self.blocks(first, last))

    def _repeat(self, values: Array) -> Array:
        blocks = self.k // self.form.block
        with np.errstate(over="ignore"):  # the check that all are finite tells
            return values.astype(np.float16).repeat(blocks // values.shape[1], axis=1)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of FP8 times scales of one row, of blocks of rows and columns, or of all."""

    codes: TensorInfo
    scales: TensorInfo
    block: tuple[int, int]

    def values(self, first: int, last: int) -> Array:
        """Return rows [first, last) as bfloat16."""
        shape = self.codes.shape
        scales = self.scales.dtype.widen(map_tensor(self.scales))
        scales = scales.reshape(*scales.shape, *(1,) * (2 - scales.ndim))
        high = shape[0] if len(scales) == 1 else self.block[0]
        wide = shape[1] if scales.shape[1] == 1 else self.block[1]
        own = scales[np.arange(first, last) // high].repeat(wide, axis=1)[:, : shape[1]]
        codes = map_tensor(self.codes)[first:last]
        return DTYPES["bf16"].narrow(self.codes.dtype.widen(codes) * own)


# ---- words of several codes ----


def _fields(words: Array, bits: int) -> Array:
    """Return uint8 [...][words][codes of a word], the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = words.view(np.uint32)[..., None] >> shifts
    return (wide & np.uint32((1 << bits) - 1)).astype(np.uint8)


def _down(info: TensorInfo, bits: int, first: int, last: int) -> Array:
    """Return columns [first, last) of words [k / codes][n], which hold neighbours along K."""
    fields = _fields(np.ascontiguousarray(map_tensor(info)[:, first:last]), bits)
    return fields.transpose(1, 0, 2).reshape(last - first, -1)


def _across(
    info: TensorInfo, bits: int, order: tuple[int, ...] | None, first: int, last: int
) -> Array:
    """Return columns [first, last) of words [...][n / codes], which hold neighbours along N."""
    share = 32 // bits
    low, high = first // share, -(-last // share)
    fields = _fields(np.ascontiguousarray(map_tensor(info)[:, low:high]), bits)
    if order is not None:
        fields = fields[..., np.argsort(order)]
    rows = fields.reshape(len(fields), -1).T
    return rows[first - low * share : last - low * share]


def _along(info: TensorInfo, bits: int, k: int, first: int, last: int) -> Array:
    """Return rows [first, last) of words [n][k / codes]."""
    fields = _fields(np.ascontiguousarray(map_tensor(info)[first:last]), bits)
    return fields.reshape(last - first, -1)[:, :k]


def _floats(info: TensorInfo, turned: bool, first: int, last: int) -> Array:
    """Return scales of rows [first, last) of [n][groups], or `turned` [groups][n]."""
    values = map_tensor(info)
    rows = values[:, first:last].T if turned else values[first:last]
    return info.dtype.widen(np.ascontiguousarray(rows))


# ---- layouts ----


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix whose tensors are at hand, and what its configuration says of it."""

    name: str
    parts: Parts
    config: Config

    def fail(self, problem: str) -> SpecError:
        """Return the error for this matrix."""
        path = next(iter(self.parts.values())).path
        return SpecError(f"{path}: the matrix {self.name} {problem}")

    def part(self, name: str) -> TensorInfo:
        """Return one of its tensors, of two dimensions."""
        info = self.any(name)
        if len(info.shape) != 2:
            raise self.fail(f"has a tensor {name} of shape {list(info.shape)}")
        return info

    def any(self, name: str) -> TensorInfo:
        """Return one of its tensors."""
        if name not in self.parts:
            raise self.fail(f"has no tensor {name}")
        return self.parts[name]

    def words(self, name: str) -> TensorInfo:
        """Return a tensor of words of 32 bits."""
        info = self.part(name)
        if info.dtype.name not in ("i32", "u32"):
            raise self.fail(f"has {name} of type {info.dtype.name}, not i32")
        return info

    def info(self, main: TensorInfo, n: int, scales: TensorInfo, rows: CodedRows) -> TensorInfo:
        """Return the tensor of the whole matrix; SpecError where groups are no whole blocks."""
        high, groups = scales.shape if scales.shape[0] == n else scales.shape[::-1]
        blocks, rest = divmod(rows.k, rows.form.block)
        if high != n or rest or not groups or blocks % groups:
            raise self.fail(
                f"has {n} x {rows.k} values and scales of shape {list(scales.shape)}, which are no "
                f"groups of multiples of {rows.form.block} values"
            )
        name, kind, shape = f"{self.name}.weight", rows.form.name, (n, rows.k)
        return replace(main, name=name, dtype=DTYPES["f32"], shape=shape, kind=kind, packed=rows)


def _form(bits: int, minimum: bool) -> BlockFormat:
    """Return the format of blocks of 32.

    The kernels could have blocks of 128, as most files do: 8 % fewer bytes, but they are slower
    (measured: 65 tokens/s of one request for 79, of eight 249 for 272).
    """
    form = FORMATS[BlockFormat(bits, GROUP, minimum=minimum).name]
    assert isinstance(form, BlockFormat)
    return form


def _bits(config: Config, known: tuple[int, ...]) -> int:
    bits = config.integer("bits", 1, 64)
    if bits not in known:
        raise config.fail("bits", f"but only {' and '.join(map(str, known))} are supported")
    return bits


def _gptq(matrix: _Matrix) -> TensorInfo:
    """GPTQ: words along K, zeros one too low in its first format."""
    config, main, zeros = matrix.config, matrix.words("qweight"), matrix.words("qzeros")
    scales, bits = matrix.part("scales"), _bits(matrix.config, (4, 8))
    if (version := config.text("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise config.fail("checkpoint_format", "but only gptq and gptq_v2 are supported")
    k = main.shape[0] * 32 // bits
    if order := matrix.parts.get("g_idx"):
        groups = map_tensor(order)
        if (groups != np.arange(len(groups)) // (k // max(scales.shape[0], 1))).any():
            raise matrix.fail(
                "has groups in another order (desc_act), which is not supported; take a checkpoint "
                "without it, or a GGUF file"
            )
    below = int(version == "gptq")
    middle = _uniform(zeros, bits) == (1 << (bits - 1)) - below
    if bits == 8 and not middle:
        raise matrix.fail("has 8 bits and zeros other than 128, which is not supported")
    rows = CodedRows(
        _form(bits, not middle),
        k,
        partial(_down, main, bits),
        partial(_floats, scales, True),
        None if middle else partial(_across, zeros, bits, None),
        below,
    )
    return matrix.info(main, main.shape[1], scales, rows)


def _awq(matrix: _Matrix) -> TensorInfo:
    """AWQ: words along N, in an order of their own."""
    config, main, scales = matrix.config, matrix.words("qweight"), matrix.part("scales")
    if config.text("version", "gemm").lower() != "gemm":
        raise config.fail("version", "but of AWQ only gemm is supported")
    bits = _bits(config, (4,))
    zeros = partial(_across, matrix.words("qzeros"), bits, AWQ_ORDER)
    codes = partial(_across, main, bits, AWQ_ORDER)
    k = main.shape[0]
    rows = CodedRows(_form(bits, True), k, codes, partial(_floats, scales, True), zeros)
    return matrix.info(main, main.shape[1] * 32 // bits, scales, rows)


def _packed_words(matrix: _Matrix) -> TensorInfo:
    """compressed-tensors, pack-quantized: words along K, scales row by row."""
    main, scales = matrix.words("weight_packed"), matrix.part("weight_scale")
    if "weight_g_idx" in matrix.parts:
        raise matrix.fail("has groups in another order (actorder), which is not supported")
    shape = [int(size) for size in map_tensor(matrix.any("weight_shape"))]
    k = shape[-1]
    bits = next((b for b in (4, 8) if -(-k * b // 32) == main.shape[1]), 0)
    if not bits or shape != [main.shape[0], k]:
        raise matrix.fail(f"is {shape} in words of shape {list(main.shape)}, not of 4 or 8 bits")
    zeros = None
    if "weight_zero_point" in matrix.parts:
        zeros = partial(_below, matrix.words("weight_zero_point"), bits)
    if bits == 8 and zeros is not None:
        raise matrix.fail("has 8 bits and zero points, which is not supported")
    codes = partial(_along, main, bits, k)
    rows = CodedRows(
        _form(bits, zeros is not None), k, codes, partial(_floats, scales, False), zeros
    )
    return matrix.info(main, main.shape[0], scales, rows)


def _below(info: TensorInfo, bits: int, first: int, last: int) -> Array:
    """Return rows [first, last) of words [n / codes][groups], which hold neighbours along N."""
    share = 32 // bits
    low, high = first // share, -(-last // share)
    fields = _fields(np.ascontiguousarray(map_tensor(info)[low:high]), bits)
    rows = fields.transpose(0, 2, 1).reshape(-1, fields.shape[1])
    return rows[first - low * share : last - low * share]


def _bytes(matrix: _Matrix) -> TensorInfo:
    """int-quantized of compressed-tensors, and FP8: a value in each byte."""
    main, parts = matrix.part("weight"), matrix.parts
    scales = matrix.any("weight_scale" if "weight_scale" in parts else "weight_scale_inv")
    if scales.dtype.name not in ("f32", "f16", "bf16"):
        raise matrix.fail(f"has scales of type {scales.dtype.name}")
    if "weight_zero_point" in parts and map_tensor(parts["weight_zero_point"]).any():
        raise matrix.fail("has bytes and zero points, which is not supported")
    if main.dtype.name == "i8":
        codes, floats = partial(_of_bytes, main), partial(_floats, scales, False)
        rows = CodedRows(_form(8, False), main.shape[1], codes, floats)
        return matrix.info(main, main.shape[0], matrix.part("weight_scale"), rows)
    if main.dtype.name != "f8":
        raise matrix.fail(f"has scales beside values of type {main.dtype.name}")
    blocks = (1, main.shape[1]), tuple(matrix.config.values.get("weight_block_size") or FP8_BLOCK)
    found = [block for block in blocks if _fits(block, main, scales)]
    if not found:
        raise matrix.fail(f"of shape {list(main.shape)} has scales of shape {list(scales.shape)}")
    values = ScaledRows(main, scales, found[0])
    return replace(main, dtype=DTYPES["bf16"], kind="BF16", packed=values)


def _fits(block: tuple[int, ...], main: TensorInfo, scales: TensorInfo) -> bool:
    """Tell whether scales are those of blocks of rows and columns, or of all of them."""
    counts = [-(-size // step) for size, step in zip(main.shape, block, strict=True)]
    shape = (*scales.shape, 1, 1)[: max(2, len(scales.shape))]
    return len(shape) == 2 and all(s in (1, c) for s, c in zip(shape, counts, strict=True))


def _of_bytes(info: TensorInfo, first: int, last: int) -> Array:
    return map_tensor(info)[first:last].view(np.uint8) ^ np.uint8(128)


def _uniform(info: TensorInfo, bits: int) -> int | None:
    """Return the code that all of a tensor's are, None where they differ."""
    fields = _fields(np.ascontiguousarray(map_tensor(info)), bits)
    return int(fields.flat[0]) if fields.size and (fields == fields.flat[0]).all() else None


_METHODS: dict[str, tuple[tuple[str, Callable[[_Matrix], TensorInfo]], ...]] = {
    "gptq": (("qweight", _gptq),),
    "awq": (("qweight", _awq),),
    "compressed-tensors": (("weight_packed", _packed_words), ("weight_scale", _bytes)),
    "fp8": (("weight_scale_inv", _bytes), ("weight_scale", _bytes)),
}
"""quant_method to the tensors that tell a quantised matrix, and how it is read."""


def packed_tensors(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """Return the checkpoint with the matrices of `quantization_config` as one tensor each.

    Raises SpecError for methods and layouts that are not read.
    """
    if not config.has(QUANTISED):
        return checkpoint
    section = config.section(QUANTISED)
    method = section.text("quant_method", "")
    method = section.text("packing_format", method).rpartition("auto_")[2]  # AutoRound's
    if method not in _METHODS:
        raise SpecError(
            f"{config.name}: quantization_config says {method!r}, which is not supported; "
            f"supported: {', '.join(_METHODS)}, and GGUF files"
        )
    return replace(checkpoint, tensors={i.name: i for i in _merge(checkpoint, section, method)})


def _merge(checkpoint: Checkpoint, section: Config, method: str) -> Iterator[TensorInfo]:
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        stem, _, part = name.rpartition(".")
        if part not in _FORGOTTEN:
            grouped.setdefault(stem, {})[part] = info
    for stem, parts in grouped.items():
        read = next((read for part, read in _METHODS[method] if part in parts), None)
        if read is None:
            yield from parts.values()
            continue
        yield read(_Matrix(stem, parts, section))
        if "bias" in parts:
            yield parts["bias"]
