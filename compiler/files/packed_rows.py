"""Rows of quantised matrices, read from the several tensors that a checkpoint has of each.

In: tensors of codes, scales and zero points. Out: `Blocks` of our own formats, or values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.files.checkpoint import Coded, TensorInfo, map_tensor
from dovetail.compiler.files.config import Config
from dovetail.ir.block_format import GROUP, BlockFormat, Blocks
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS

Array = npt.NDArray[Any]
WORDS, FLOATS = ("i32", "u32"), ("f32", "f16", "bf16")


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
        words = np.ascontiguousarray(stored_matrix(self.info, self.turned)[first:last])
        if self.plus:
            words = words.view(np.uint32) + np.uint32(self.plus)
        fields = words[..., None].view(np.uint8)
        if self.bits == 4:
            fields = np.stack((fields & 15, fields >> 4), -1).reshape(*words.shape, -1)
        return fields

    def uniform(self, code: int) -> bool:
        """Tell whether every code is `code`, of integers of 32 bits."""
        wanted = (code * ones(self.bits) - self.plus) % (1 << 32)
        return bool((map_tensor(self.info).view(np.uint32) == wanted).all())


def ones(bits: int) -> int:
    """Return the word whose codes are all 1."""
    return ((1 << 32) - 1) // ((1 << bits) - 1)


def stored_matrix(info: TensorInfo, turned: bool) -> Array:
    """Return a stored tensor, the last dimension first where it is `turned`."""
    return map_tensor(info).T if turned else map_tensor(info)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of integers: value = scale (code - zero), of groups of K.

    scales: [n][groups], or `codes.turned` [groups][n]. zeros: None where all are half of the codes.
    parts: of the scale that the file has, our own is one. order: where the values of K stand in the
    file that blocks have one after another; None where they have that order there, too.
    """

    form: BlockFormat
    codes: Codes
    scales: TensorInfo
    zeros: Codes | None = None
    parts: int = 1
    order: Array | None = field(default=None, compare=False)

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows [first, last) as codes and float16 scales of `form`, K in `order`."""
        codes = self.codes.rows(first, last)
        if self.order is not None:
            codes = codes[:, self.order]
        scales = self.scales.dtype.widen(stored_matrix(self.scales, self.codes.turned)[first:last])
        scales = scales / np.float32(self.parts)
        if self.form.bits == 8 and self.codes.share > 1:
            codes = codes ^ np.uint8(128)  # bytes with a sign
        minimums = None
        if self.zeros is not None:
            minimums = self._repeat(-scales * self.zeros.rows(first, last))
        return Blocks(codes, self._repeat(scales), minimums)

    def values(self, first: int, last: int) -> Array:
        """Return the same rows as float32, K as the file has it."""
        found = self.form.values(self.blocks(first, last))
        return found if self.order is None else found[:, np.argsort(self.order)]

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


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix: its tensors by what follows its name, and its configuration."""

    name: str
    parts: Mapping[str, TensorInfo]
    config: Config

    def fail(self, problem: str) -> SpecError:
        """Return the error for this matrix."""
        path = next(iter(self.parts.values())).path
        return SpecError(f"{path}: the matrix {self.name} {problem}")

    def fail_blocks(self, problem: str, bits: int = 4) -> SpecError:
        """Return the error where K is cut into other blocks than those of our formats."""
        remedy = f"take the float model with --weight-dtype int{bits}"
        return self.fail(f"has {problem}; {remedy}")

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

    def info(
        self,
        codes: Codes,
        scales: TensorInfo,
        zeros: Codes | None = None,
        parts: int = 1,
        places: str = "",
    ) -> TensorInfo:
        """Return the tensor of the whole matrix; SpecError where groups are no whole blocks."""
        if codes.bits == 8 and zeros is not None:
            raise self.fail("has 8 bits and zero points, which is not supported")
        # blocks of 128, as most files have them, are slower in the kernels (65 tokens/s of 79)
        form = FORMATS[BlockFormat(codes.bits, GROUP, minimum=zeros is not None).name]
        assert isinstance(form, BlockFormat)
        n, k = codes.shape
        high, groups = scales.shape[:: -1 if codes.turned else 1]
        if high != n or not groups:
            raise self.fail(f"has {n} x {k} values, not scales of shape {list(scales.shape)}")
        if k % (form.block * groups):
            problem = (
                f"rows of {k} values in groups of {k / groups:g}, not of a multiple of {form.block}"
            )
            raise self.fail_blocks(problem, codes.bits)
        if zeros and (zeros.shape[1] != groups or not 0 <= zeros.shape[0] - n < zeros.share):
            raise self.fail(f"has zero points of shape {list(zeros.info.shape)}")
        rows = CodedRows(form, codes, scales, zeros, parts, self.order(places, k, groups))
        return self.coded(codes.info, (n, k), form, rows)

    def order(self, places: str, k: int, groups: int) -> Array | None:
        """Return in which order of K groups are whole, by the tensor that tells each value's."""
        if places not in self.parts:
            return None
        given = map_tensor(self.any(places, WORDS)).astype(np.int64).reshape(-1)
        if (given == -1).all():  # as it is before it is told
            return None
        order = np.argsort(given, kind="stable")
        if not np.array_equal(given[order], np.arange(k) * groups // k):
            raise self.fail(
                f"has a {places} that does not divide K into {groups} groups of equal size"
            )
        return None if (order[1:] > order[:-1]).all() else order

    def coded(
        self, main: TensorInfo, shape: tuple[int, int], form: BlockFormat, rows: Coded
    ) -> TensorInfo:
        """Return the tensor of the whole matrix, whose rows are of a format."""
        main = replace(main, name=f"{self.name}.weight", dtype=DTYPES["f32"])
        return replace(main, shape=shape, kind=form.name, packed=rows)
