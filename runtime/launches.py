"""Binds a tape for a GPU: entries become kernel launches, and products for a library of these.

In: a tape, the module's index, and where operands lie on the device. Out: a `LaunchTape`, whose
segments are given to a stream with the integers of a step. In a group sums over its ranks are such
work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.errors import ArtifactError
from dovetail.ir.tape import ArgRef, Entry, FloatConst, IntConst, Slot, Tape, WeightRef
from dovetail.runtime.abi import ALL_GATHER, COLLECTIVES
from dovetail.runtime.cuda import Operand

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "rmsnorm": ("rmsnorm",),
    "rope_store": ("rope_store",),
    "prefill_attention": ("prefill_attention_lanes",),
    "decode_attention": ("decode_attention", "decode_attention_merge"),
    "gather_rows": ("gather_rows",),
    "sample": ("sample",),
    "packed_attention": ("packed_attention_lanes",),
    "activate_rows": ("activate_rows_tanh",),
    **{family: (family,) for family in ("embed_sum", "rope_rows", "layernorm")},
    **{family: (family,) for family in ("mean_rows", "unit_rows")},
}
"""Operator to the kernels that compute it on a GPU, one after the other, by family or name."""
LINEAR = ("M", "N", "K", "A", "lda", "B", "stride", "bias", "R", "ldr", "C", "ldc")
GATED = (*LINEAR[:8], "C", "ldc")
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qkv", "o", "up", "down", "head", "pooler", "classifier"), LINEAR),
    "gate_up": GATED,
}
"""Operator to the slots that its entry begins with."""
ROWS_OF_SEQUENCES = ("n_out", "n_sequences")
"""Numbers of rows that are at most a tape's sequences; others are at most its tokens."""
DECODER_ENDS: Mapping[str, str] = {"gate_up": "gate_rows_silu"}
"""Operator to the kernel that ends it, where a product has an activation: of decoders."""

Address: TypeAlias = Callable[[Slot], int]
"""Gives where an operand lies on the device."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """float32 rows of `columns` values, `stride` apart, at an address of the device."""

    address: int
    columns: int
    stride: int


@dataclass(frozen=True, slots=True)
class Product:
    """out = a W^T + bias + residual for the first rows of each; weights and biases by name."""

    a: Matrix
    weight: str
    bias: str | None
    residual: Matrix | None
    out: Matrix


class Products(Protocol):
    """A library of matrix products on the device's memory."""

    def bind(self, product: Product, rows: int) -> Any:
        """Return what `run` takes for `product` of at most `rows` rows."""

    def run(self, bound: Any, rows: int, stream: int) -> None:
        """Give the product of the first `rows` rows to a stream; CapacityError without memory."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What all ranks do together on the first rows of `x`: a sum, or a gather of `parts`.

    parts: how many units of how many columns are dealt to the ranks.
    """

    x: Matrix
    parts: tuple[int, int] | None


class Sums(Protocol):
    """The ranks' devices, as one of them sees them."""

    def bind(self, exchange: Exchange, rows: int) -> Any:
        """Return what `run` takes for `exchange` of at most `rows` rows."""

    def run(self, bound: Any, rows: int, stream: int) -> None:
        """Give it for the first `rows` rows to a stream; RankError when the group has failed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and its operands; texts are integers of the step, by their names."""

    kernel: str
    operands: tuple[Operand | str, ...]
    rows: str
    skip: str | None = None
    lone_rows: bool = False


@dataclass(frozen=True, slots=True)
class Multiply:
    """A bound product and the name of its number of rows."""

    product: Any
    rows: str


@dataclass(frozen=True, slots=True)
class Meet:
    """A bound exchange and the name of its number of rows."""

    exchange: Any
    rows: str


def by_family(kernels: Mapping[str, KernelEntry]) -> dict[str, KernelEntry]:
    """Return a module's kernels by family, the last of each, and by name."""
    return {kernel.family: kernel for kernel in kernels.values()} | dict(kernels)


class Launcher(Protocol):
    """Starts kernels: a `CudaModule`."""

    def launch(
        self, kernel: str, operands: Sequence[Operand], warps: int, stream: int | None = None
    ) -> None:
        """Start `kernel` on `warps` warps."""


class LaunchTape:
    """A tape for the compute stream of one GPU."""

    def __init__(
        self,
        tape: Tape,
        kernels: Mapping[str, KernelEntry],
        address: Address,
        products: Products,
        gated: int,
        sums: Sums | None = None,
        ends: Mapping[str, str] = DECODER_ENDS,
    ) -> None:
        """Bind a tape.

        Args:
            tape: the tape.
            kernels: of the module, one of each family but where a name is asked for.
            address: where operands lie.
            products: the library of products.
            gated: where gate and up of a step lie before they are multiplied.
            sums: the group whose tape it is.
            ends: the activations of products.

        Raises:
            ArtifactError: the module lacks a kernel.
        """
        self.tape, self._ends = tape, ends
        self._kernels = by_family(kernels)
        self._address, self._products, self._gated = address, products, gated
        self._sums = sums
        self.work = [self._bind(entry) for entry in tape.entries]

    def segment(self, name: str) -> range:
        """Return the entries of segment `name`, which lie together."""
        places = [i for i, entry in enumerate(self.tape.entries) if entry.segment == name]
        return range(places[0], places[-1] + 1) if places else range(0)

    def run(
        self, span: range, args: Mapping[str, int], module: Launcher, warps: int, stream: int
    ) -> None:
        """Give the entries of `span` to a stream, with the integers of a step in `args`."""
        for entry in span:
            for work in self.work[entry]:
                if isinstance(work, Multiply):
                    self._products.run(work.product, args[work.rows], stream)
                elif isinstance(work, Meet):
                    assert self._sums is not None
                    self._sums.run(work.exchange, args[work.rows], stream)
                elif work.skip is None or args[work.skip]:
                    most = min(warps, args[work.rows]) if work.lone_rows else warps
                    values = [args[v] if isinstance(v, str) else v for v in work.operands]
                    module.launch(work.kernel, values, most, stream)

    def _bind(self, entry: Entry) -> tuple[Launch | Multiply | Meet, ...]:
        if entry.op in PRODUCTS:
            return self._bind_product(entry)
        if entry.op in COLLECTIVES:
            return (self._bind_exchange(entry),)
        return tuple(
            Launch(
                kernel=kernel.name,
                operands=self._operands(kernel, entry.slots),
                rows=entry.m,
                skip=entry.skip_if_zero,
                lone_rows=entry.op == "sample",  # each warp has scratch of its own
            )
            for kernel in map(self._kernel, FAMILIES[entry.op])
        )

    def _kernel(self, name: str) -> KernelEntry:
        try:
            return self._kernels[name]
        except KeyError:
            raise ArtifactError(
                f"the artifact's kernels for cuda lack {name!r}; run `dovetail compile MODEL` "
                "again with `--target cuda`"
            ) from None

    def _operands(self, kernel: KernelEntry, slots: Sequence[Slot]) -> tuple[Operand | str, ...]:
        params = [param for param in kernel.params if param.kind == "slot"]
        return tuple(
            self._operand(slot, pointer=param.type.startswith("ptr["))
            for param, slot in zip(params, slots, strict=True)
        )

    def _operand(self, slot: Slot, *, pointer: bool) -> Operand | str:
        if isinstance(slot, IntConst | FloatConst):
            return slot.value
        if isinstance(slot, ArgRef) and not pointer:
            return slot.name
        return self._address(slot)

    def _bind_product(self, entry: Entry) -> tuple[Launch | Multiply, ...]:
        """Return the product and its end; gate and up go to `gated` and are multiplied there."""
        slots = dict(zip(PRODUCTS[entry.op], entry.slots, strict=False))
        weight, bias = slots["B"], slots["bias"]
        assert isinstance(weight, WeightRef) and weight.name is not None
        assert isinstance(bias, WeightRef)
        n, k = _integer(slots["N"]), _integer(slots["K"])
        out = self._matrix(slots["C"], n, slots["ldc"])
        residual = None
        if "R" in slots and slots["R"] != WeightRef(name=None):
            residual = self._matrix(slots["R"], n, slots["ldr"])
        a = self._matrix(slots["A"], k, slots["lda"])
        rows = (out.address, out.stride)
        operands: tuple[Operand | str, ...] = (entry.m, n, *rows, *rows)
        if entry.op == "gate_up":
            out = Matrix(self._gated, 2 * n, 2 * n)
            operands = (entry.m, n, self._gated, 2 * n, self._gated + 4 * n, 2 * n, *rows)
        multiply = self._multiply(Product(a, weight.name, bias.name, residual, out), entry.m)
        if entry.op not in self._ends:
            return (multiply,)
        return multiply, Launch(self._kernel(self._ends[entry.op]).name, operands, entry.m)

    def _bind_exchange(self, entry: Entry) -> Meet:
        slots = dict(zip(COLLECTIVES[entry.op], entry.slots, strict=True))
        x = self._matrix(slots["x"], _integer(slots["columns"]), slots["stride"])
        gathers = entry.op == ALL_GATHER
        parts = (_integer(slots["units"]), _integer(slots["size"])) if gathers else None
        assert self._sums is not None
        return Meet(self._sums.bind(Exchange(x, parts), self._most_rows(entry.m)), entry.m)

    def _multiply(self, product: Product, rows: str) -> Multiply:
        return Multiply(self._products.bind(product, self._most_rows(rows)), rows)

    def _most_rows(self, rows: str) -> int:
        few = rows in ROWS_OF_SEQUENCES
        return self.tape.max_sequences if few else self.tape.max_tokens

    def _matrix(self, slot: Slot, columns: int, stride: Slot) -> Matrix:
        """`stride` is a constant, or an argument that every step gives alike."""
        apart = self._address(stride) if isinstance(stride, ArgRef) else _integer(stride)
        return Matrix(self._address(slot), columns, apart)


def _integer(slot: Slot) -> int:
    assert isinstance(slot, IntConst)
    return slot.value
