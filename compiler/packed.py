"""Quantised checkpoints in safetensors: GPTQ, AWQ, compressed-tensors and FP8.

In: a checkpoint whose config.json has a `quantization_config`. Out: the checkpoint with one tensor
for each matrix, `<name>.weight`, that reads its rows from the tensors it is stored in. Integers of
4 and 8 bits become blocks of our own, whose scales are repeated where groups are longer; values of
FP8 times their scales become bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
QUANTISED = "quantization_config"
WORDS, FLOATS = ("i32", "u32"), ("f32", "f16", "bf16")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, counted from the lowest, hold each of eight neighbouring columns."""
FP8_BLOCK = [128, 128]
"""Rows and columns of a block of FP8 that share a scale, unless config.json says otherwise."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of 4 or 8 bits [n][k] in integers, the first in the lowest bits.

    turned: the tensor is stored [k][n]. across: an integer holds neighbours among rows, not along
    K; order: which of its places each has. plus: what is added to every integer first.
    """

    info: TensorInfo
    bits: int
    turned: bool = False
    across: bool = False
    order: tuple[int, ...] | None = None
    plus: int = 0

    @property
    def share(self) -> int:
        """Codes of an integer."""
        return self.info.dtype.size * 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, padded where an integer holds several, and codes of a row."""
        high, wide = self.info.shape[::-1] if self.turned else self.info.shape
        return (high * self.share, wide) if self.across else (high, wide * self.share)

    def rows(self, first: int, last: int) -> Array:
        """Return the codes of rows [first, last), uint8 [rows][k]."""
        if not self.across:
            return self._fields(first, last).reshape(last - first, -1)
        low, high = first // self.share, -(-last // self.share)
        fields = self._fields(low, high).transpose(0, 2, 1)[:, self.order or range(self.share)]
        rows = fields.reshape(-1, self.shape[1])
        return rows[first - low * self.share : last - low * self.share]

    def _fields(self, first: int, last: int) -> Array:
        """Return uint8 [rows][integers][codes of each] of stored rows [first, last)."""
        words = np.ascontiguousarray(_stored(self.info, self.turned)[first:last])
        if self.plus:
            words = words.view(np.uint32) + np.uint32(self.plus)
        fields = words[..., None].view(np.uint8)
        if self.bits == 4:
            fields = np.stack((fields & 15, fields >> 4), -1).reshape(*words.shape, -1)
        return fields

    def uniform(self, code: int) -> bool:
        """Tell whether every code is `code`, of integers of 32 bits."""
        wanted = (code * _ones(self.bits) - self.plus) % (1 << 32)
        return bool((map_tensor(self.info).view(np.uint32) == wanted).all())


def _ones(bits: int) -> int:
    """Return the word whose codes are all 1."""
    return ((1 << 32) - 1) // ((1 << bits) - 1)


def _stored(info: TensorInfo, turned: bool) -> Array:
    return map_tensor(info).T if turned else map_tensor(info)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of integers: value = scale (code - zero), of groups of K.

    scales: [n][groups], or `codes.turned` [groups][n]. zeros: None where all are half of the codes.
    """

    form: BlockFormat
    codes: Codes
    scales: TensorInfo
    zeros: Codes | None = None

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows [first, last) as codes and float16 scales of `form`."""
        codes = self.codes.rows(first, last)
        scales = self.scales.dtype.widen(_stored(self.scales, self.codes.turned)[first:last])
        if self.form.bits == 8 and self.codes.share > 1:
            codes = codes ^ np.uint8(128)  # bytes with a sign
        minimums = None
        if self.zeros is not None:
            minimums = self._repeat(-scales * self.zeros.rows(first, last))
        return Blocks(codes, self._repeat(scales), minimums)

    def values(self, first: int, last: int) -> Array:
        """Return the same rows as float32."""
        return self.form.values(self.blocks(first, last))

    def _repeat(self, values: Array) -> Array:
        blocks = self.codes.shape[1] // self.form.block
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


# ---- layouts ----


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix: its tensors by what follows its name, and its configuration."""

    name: str
    parts: Mapping[str, TensorInfo]
    config: Config

    def fail(self, problem: str) -> SpecError:
        """Return the error for this matrix."""
        path = next(iter(self.parts.values())).path
        return SpecError(f"{path}: the matrix {self.name} {problem}")

    def any(self, name: str, types: tuple[str, ...]) -> TensorInfo:
        """Return one of its tensors, of one of these types."""
        if name not in self.parts:
            raise self.fail(f"has no tensor {name}")
        if (found := self.parts[name].dtype.name) not in types:
            raise self.fail(f"has a tensor {name} of type {found}, not {' or '.join(types)}")
        return self.parts[name]

    def part(self, name: str, types: tuple[str, ...]) -> TensorInfo:
        """Return such a tensor of two dimensions."""
        info = self.any(name, types)
        if len(info.shape) != 2:
            raise self.fail(f"has a tensor {name} of shape {list(info.shape)}")
        return info

    def bits(self, words: int, count: object, known: tuple[int, ...] = (4, 8)) -> int:
        """Return of how many bits `count` codes are that lie in words."""
        if found := [bits for bits in known if words * 32 // bits == count]:
            return found[0]
        spelled = " and ".join(map(str, known))
        raise self.fail(f"has {count} codes in {words} words, not codes of {spelled} bits")

    def info(self, codes: Codes, scales: TensorInfo, zeros: Codes | None = None) -> TensorInfo:
        """Return the tensor of the whole matrix; SpecError where groups are no whole blocks."""
        if codes.bits == 8 and zeros is not None:
            raise self.fail("has 8 bits and zero points, which is not supported")
        # blocks of 128, as most files have them, are slower in the kernels (65 tokens/s of 79)
        form = FORMATS[BlockFormat(codes.bits, GROUP, minimum=zeros is not None).name]
        assert isinstance(form, BlockFormat)
        n, k = codes.shape
        high, groups = scales.shape[:: -1 if codes.turned else 1]
        if high != n or not groups or k % (form.block * groups):
            raise self.fail(
                f"has {n} x {k} values and scales of shape {list(scales.shape)}, which are no "
                f"groups of multiples of {form.block} values"
            )
        if zeros and (zeros.shape[1] != groups or not 0 <= zeros.shape[0] - n < zeros.share):
            raise self.fail(f"has zero points of shape {list(zeros.info.shape)}")
        rows = CodedRows(form, codes, scales, zeros)
        main = replace(codes.info, name=f"{self.name}.weight", dtype=DTYPES["f32"])
        return replace(main, shape=(n, k), kind=form.name, packed=rows)


def _gptq(matrix: _Matrix) -> TensorInfo:
    """GPTQ: words along K; in its first format 1 was taken from every zero, with borrows."""
    stored, scales = matrix.part("qzeros", WORDS), matrix.part("scales", FLOATS)
    bits = matrix.bits(stored.shape[1], scales.shape[1])
    plus = 0 if _layout(matrix.config, "gptq") == "gptq_v2" else _ones(bits)
    codes = Codes(matrix.part("qweight", WORDS), bits, turned=True)
    zeros = Codes(stored, bits, turned=True, across=True, plus=plus)
    info = matrix.info(codes, scales, None if zeros.uniform(1 << (bits - 1)) else zeros)
    if order := matrix.parts.get("g_idx"):
        k = codes.shape[1]
        if not np.array_equal(map_tensor(order), np.arange(k) * scales.shape[0] // k):
            raise matrix.fail(
                "has groups in another order (desc_act), which is not supported; take a checkpoint "
                "without it, or a GGUF file"
            )
    return info


def _awq(matrix: _Matrix) -> TensorInfo:
    """AWQ: words along N, in an order of their own."""
    main, scales = matrix.part("qweight", WORDS), matrix.part("scales", FLOATS)
    bits = matrix.bits(main.shape[1], scales.shape[1], (4,))
    codes = Codes(main, bits, turned=True, across=True, order=AWQ_ORDER)
    return matrix.info(codes, scales, replace(codes, info=matrix.part("qzeros", WORDS)))


def _packed_words(matrix: _Matrix) -> TensorInfo:
    """compressed-tensors, pack-quantized: words along K, scales row by row."""
    main, scales = matrix.part("weight_packed", WORDS), matrix.part("weight_scale", FLOATS)
    if "weight_g_idx" in matrix.parts:
        raise matrix.fail("has groups in another order (actorder), which is not supported")
    shape = map_tensor(matrix.any("weight_shape", ("i64", "i32"))).tolist()
    if not isinstance(shape, list) or len(shape) != 2 or shape[0] != main.shape[0]:
        raise matrix.fail(f"is {shape} in words of shape {list(main.shape)}")
    codes, zeros = Codes(main, matrix.bits(main.shape[1], shape[1])), None
    if "weight_zero_point" in matrix.parts:
        zeros = Codes(matrix.part("weight_zero_point", WORDS), codes.bits, across=True)
    return matrix.info(codes, scales, zeros)


def _bytes(matrix: _Matrix) -> TensorInfo:
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
_METHODS: dict[str, tuple[tuple[str, Callable[[_Matrix], TensorInfo]], ...]] = {
    "gptq": (("qweight", _gptq),),
    "awq": (("qweight", _awq),),
    "compressed-tensors": (("weight_packed", _packed_words), ("weight_scale", _bytes)),
    "fp8": (("weight_scale_inv", _bytes), ("weight_scale", _bytes)),
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
