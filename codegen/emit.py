"""Lowered kernels to one C text: helpers, kernels, tape entries and tvm-ffi wrappers.

In: frozen `KernelSpec`s. Out: C text. All decisions are made here; the templates lay out text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from dovetail.codegen.extents import EXTENTS, extents_in_c, limits_in_c, range_of
from dovetail.codegen.isa.target import Target
from dovetail.ir.artifact import KernelEntry, KernelParam
from dovetail.ir.expr import Binary, Name
from dovetail.ir.low.nodes import Declare, Function, Unit
from dovetail.ir.schedule import SCHEDULE_VALUES


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel to emit: its index entry, its lowered unit (the function and its helpers), texts.

    texts: of the unit's items, which are printed once.
    """

    entry: KernelEntry
    unit: Unit
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """What a tvm-ffi wrapper evaluates for an argument, and what it says was wanted."""

    name: str
    call: str
    wanted: str


@dataclass(frozen=True, slots=True)
class KernelText:
    """Everything the template lays out for one kernel; `helpers` are (name, text) in C's order."""

    name: str
    family: str
    helpers: tuple[tuple[str, str], ...]
    prototype: str
    binding: tuple[tuple[str, int | str], ...]
    items: tuple[str, ...]
    entry_arguments: tuple[str, ...]
    ffi_arguments: tuple[str, ...]
    checks: tuple[ArgumentCheck, ...]
    limits: tuple[ArgumentCheck, ...]


FFI_DTYPES: dict[str, tuple[int, int, str]] = {
    "f32": (1 << 2, 32, "float32"),
    "f64": (1 << 2, 64, "float64"),
    "i32": (1 << 0, 32, "int32"),
    "i64": (1 << 0, 64, "int64"),
    "u8": (1 << 1, 8, "uint8"),
    "i8": (1 << 0, 8, "int8"),
    "u16": (1 << 1, 16, "uint16"),
    "i16": (1 << 0, 16, "int16"),
    "u32": (1 << 1, 32, "uint32"),
    "u64": (1 << 1, 64, "uint64"),
    "bf16": (1 << 4 | 1 << 1, 16, "bfloat16 (or uint16)"),
    "f16": (1 << 2 | 1 << 1, 16, "float16 (or uint16)"),
}
"""Element type: accepted DLPack codes as a bit set, bits, and the name in messages."""

FLOATS = ("f32", "f64")
PART_SIZE = 40_000
"""Characters of a kernel that are worth a compiler run: 0.5 s, of which 0.2 s are headers."""
SHARE_SIZE = 5 * PART_SIZE
"""Characters of small kernels from which the next ones are compiled beside them."""


@lru_cache
def templates() -> Environment:
    """Return the template environment; an undefined name is an error."""
    return Environment(
        loader=PackageLoader("dovetail.codegen", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def read_template(name: str) -> str:
    """Return the text of a file of the templates folder that is used as it is: abi.h, team.c."""
    return (files("dovetail.codegen") / "templates" / name).read_text(encoding="utf-8")


def emit_unit(
    title: str,
    target: Target,
    texts: Sequence[KernelText],
    wrapped: Sequence[KernelText],
    *,
    tells_abi: bool = True,
) -> str:
    """Return one C text, which needs no other file of ours: kernels, and tvm-ffi wrappers of some.

    Of the texts that are linked into one library, one has the function that tells its ABI.
    """
    helpers = dict(helper for text in texts for helper in text.helpers)
    return (
        templates()
        .get_template("unit.c.j2")
        .render(
            title=title,
            target=target,
            abi=read_template("abi.h"),
            tells_abi=tells_abi,
            helpers=helpers.values(),
            kernels=texts,
            wrapped=wrapped,
        )
    )


def shared_helpers(kernels: Iterable[KernelSpec]) -> Iterable[Function]:
    """Return every static function the kernels' units bring along, once, each before its users."""
    functions = [f for k in kernels for f in k.unit.items if isinstance(f, Function)]
    return {f.name: f for f in functions if f.static}.values()


def part_texts(
    target: Target,
    texts: Sequence[KernelText],
    wrapped: Sequence[KernelText] = (),
    *,
    tells_abi: bool = True,
) -> tuple[str, ...]:
    """Return C texts of a library that are compiled apart, side by side.

    The first has what `emit_unit` puts beside kernels, and the first share of the small ones. A
    large one is alone in its own, which is then the same text in every library that has it.
    """
    share, *others = _shares([text for text in texts if _size(text) < PART_SIZE])
    others += [[text] for text in texts if _size(text) >= PART_SIZE]
    first = emit_unit("part", target, share, wrapped, tells_abi=tells_abi)
    return (first, *(emit_unit("part", target, part, (), tells_abi=False) for part in others))


def _shares(texts: Sequence[KernelText]) -> list[list[KernelText]]:
    """Deal kernels to as few runs of neighbours as have no more than SHARE_SIZE, at least one."""
    shares: list[list[KernelText]] = [[]]
    held = 0
    for text in texts:
        held += _size(text)
        if held > SHARE_SIZE and shares[-1]:
            shares.append([])
            held = _size(text)
        shares[-1].append(text)
    return shares


def _size(text: KernelText) -> int:
    return sum(map(len, text.items))


def kernel_text(kernel: KernelSpec, target: Target) -> KernelText:
    """Return the pieces of one kernel."""
    entry = kernel.entry
    printed = list(zip(kernel.unit.items, kernel.texts, strict=True))
    functions = {item.name: text for item, text in printed if isinstance(item, Function)}
    own = [text for item, text in printed if not (isinstance(item, Function) and item.static)]
    params = entry.params
    positions = {p.name: i for i, p in enumerate(q for q in params if q.kind == "slot")}
    nullable = nullable_names(kernel.unit.function(entry.name))
    return KernelText(
        name=entry.name,
        family=entry.family,
        helpers=tuple((f.name, functions[f.name]) for f in shared_helpers([kernel])),
        binding=tuple(entry.binding.items()),
        prototype=functions[entry.name].partition(" {")[0] + ";",
        items=tuple(text.rstrip() + "\n" for text in own),
        entry_arguments=tuple(_entry_argument(p, positions, target) for p in params),
        ffi_arguments=tuple(_from_slot(p, i, target) for i, p in enumerate(params)),
        checks=tuple(_check(p, i, p.name in nullable) for i, p in enumerate(params)),
        limits=(*_size_limits(entry), *_thread_limits(params)),
    )


def _thread_limits(params: Sequence[KernelParam]) -> Iterator[ArgumentCheck]:
    """Yield the check that a kernel's thread number is one of its threads."""
    places = {p.name: f"slots[{i}].i" for i, p in enumerate(params) if p.kind == "thread"}
    if places.keys() == {"tid", "nth"}:
        call = f"{places['tid']} >= 0 && {places['tid']} < {places['nth']}"
        yield ArgumentCheck("tid", call, "be one of 0 .. nth - 1")


def _size_limits(entry: KernelEntry) -> Iterator[ArgumentCheck]:
    """Yield what a bundled kernel asks of its integers, and of the size of its tensors.

    Integers are bounded first, so that conditions on them and the kernel's own sums hold.
    """
    places = {p.name: f"slots[{i}]" for i, p in enumerate(entry.params)}
    for param in entry.params if entry.family in EXTENTS else ():
        if pointee(param.type) is None and param.type not in FLOATS:
            least, most = range_of(param.name)
            place = f"{places[param.name]}.i"
            call = f"{place} >= {least} && {place} <= {most}"
            yield ArgumentCheck(param.name, call, f"be between {least} and {most}")
    for name, condition, wanted in limits_in_c(entry.family, entry.binding, places):
        yield ArgumentCheck(name, condition, wanted)
    needed = extents_in_c(entry.family, entry.binding, places)
    for i, param in enumerate(entry.params):
        if param.name in needed:
            call = f"sizes[{i}] >= {needed[param.name]}"
            yield ArgumentCheck(param.name, call, "hold more elements for these sizes")


def nullable_names(function: Function) -> set[str]:
    """Return the names compared for equality, and what variables so compared start out as.

    A pointer parameter among them may be null: the kernel asks.
    """
    found: set[str] = set()
    copies: set[tuple[str, str]] = set()
    for node in function.walk():
        if isinstance(node, Binary) and node.op in ("==", "!="):
            found |= {side.id for side in (node.left, node.right) if isinstance(side, Name)}
        elif isinstance(node, Declare) and isinstance(node.init, Name):
            copies.add((node.name, node.init.id))
    while more := {source for name, source in copies if name in found} - found:
        found |= more
    return found


def _entry_argument(param: KernelParam, positions: dict[str, int], target: Target) -> str:
    if param.kind == "thread":
        return param.name
    if param.kind == "sched":
        return f"schedule[{SCHEDULE_VALUES.index(param.name)}]"
    return _from_slot(param, positions[param.name], target)


def _from_slot(param: KernelParam, position: int, target: Target) -> str:
    """Return the C expression that reads a parameter from `slots[position]`."""
    element = pointee(param.type)
    if element is not None:
        return f"({target.types[element]} *)slots[{position}].p"
    field = "f" if param.type in FLOATS else "i"
    return f"({target.types[param.type]})slots[{position}].{field}"


def pointee(kind: str) -> str | None:
    """Return T of `ptr[T]`, or None for a scalar type."""
    return kind[4:-1] if kind.startswith("ptr[") else None


def _check(param: KernelParam, position: int, nullable: bool) -> ArgumentCheck:
    at = f"&args[{position}]"
    to = f"&slots[{position}]"
    element = pointee(param.type)
    if element is not None:
        codes, bits, name = FFI_DTYPES[element]
        call = f"dt_ffi_pointer({at}, {codes}u, {bits}, {int(nullable)}, {to}, &sizes[{position}])"
        wanted = f"a contiguous {name} CPU tensor{' or None' if nullable else ''}"
        return ArgumentCheck(param.name, call, wanted)
    if param.type in FLOATS:
        return ArgumentCheck(param.name, f"dt_ffi_number({at}, {to})", "a number")
    return ArgumentCheck(param.name, f"dt_ffi_integer({at}, {to})", "an integer")
