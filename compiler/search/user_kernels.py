"""Kernels of a user's own beside ours: read, fitted to an operator's slots, varied, searched for.

In: `OP=FILE`, of C or `.dk`. Out: a module with a kernel that takes what the operator's slots hold,
its variants, and searches that compare them with ours. Without `OP=` a file's kernels are added to
an artifact as they are, for `dovetail.kernels`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.codegen.catalog import KernelRequest, kernel_request
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec
from dovetail.codegen.lift.unroll import UNROLL, unroll_kernel, unroll_unit
from dovetail.codegen.lower.select import written_pointers
from dovetail.codegen.user_file import (
    Around,
    array_functions,
    is_high,
    kernel_names,
    read_pieces,
    read_source,
    read_unit,
    uncalled_functions,
)
from dovetail.compiler.measure.meter import CallCase, RowsCase
from dovetail.compiler.measure.row_ops import GATE_OPS, ROW_OPS, RowOp, model_ops
from dovetail.compiler.rules.schedules import make_schedule
from dovetail.compiler.search.instances import USER, InstanceTask, change_tiles
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SpecError
from dovetail.ir.expr import NamedType, PointerType
from dovetail.ir.high import nodes as high
from dovetail.ir.high.parse import parse_high
from dovetail.ir.high.print import print_high
from dovetail.ir.high.verify import verify_high
from dovetail.ir.model import ModelSpec
from dovetail.ir.schedule import ScheduleTable

ROW, ROWS, PAIRS = "user_row", "user_rows", "_pairs"
_TEAM = ("tid", "nth")
NAMED = {"w": r"w|g|scale", "b": r"b", "y": r"y|up", "x": r"x|in|src|a|gate"}
"""Slot of an array to how the name of a parameter for it may begin."""
TYPES = {"int": "i64", "float": "f32"}
ALONE = Around()
SIZES = (1, 16, 128)
"""Rows of the cases that stand for an operator in a model."""
IN_PAIRS = """
@kernel
def {name}(T: i64, H: i64, x: ptr[f32], ldx: i64, out: ptr[f32], ldo: i64, tid: thread,
       nth: thread):
    cuts = (H + 511) // 512
    for piece in range(T * cuts * tid // nth, T * cuts * (tid + 1) // nth):
        first = piece % cuts * 32
        panels = min(H // 16 - first, 32)
        pair = x + piece // cuts * ldx + first * 32
        to = out + piece // cuts * ldo + first * 16
        {rows}(panels, 16, pair, 32, pair + 16, 32, to, 16, 0, 1)
        if first + 32 > H // 16 and H % 16 > 0:
            pair = pair + panels * 32
            {rows}(1, H % 16, pair, 32, pair + 16, 32, to + panels * 16, 16, 0, 1)
"""
"""A gate of rows whose panels of 16 gates and 16 ups lie by turns, as a product gives them."""


@dataclass(frozen=True, slots=True)
class UserKernel:
    """A user's kernels: of an operator the fitted one and its variants, else all of the file.

    gates: of a gate the same for the rows that products of a model give.
    """

    op: str
    file: str
    unit: high.Unit
    requests: tuple[KernelRequest, ...]
    gates: tuple[KernelRequest, ...] = ()

    @property
    def module(self) -> str:
        """The name of the module, which none of ours has."""
        return self.requests[0].module

    def served(self, tables: Iterable[ScheduleTable]) -> tuple[KernelRequest, ...]:
        """Return what an artifact gets: what its tables name and the plain one; or all."""
        if not self.op:
            return self.requests
        named = {row.kernel for table in tables for row in table.rows}
        more = (*self.requests[1:], *self.gates)
        return (self.requests[0], *(r for r in more if r.name in named))


def read_user_kernels(given: Iterable[str], around: Around = ALONE) -> tuple[UserKernel, ...]:
    """Return the kernels of `OP=FILE` each, or `FILE`, whose kernels are taken as they are.

    around: what stands around those that are C. Raises SpecError for an unknown operator, one named
    twice, and a kernel that does not fit; SyntaxDiagnostic for a text that is wrong.
    """
    found = tuple(read_user_kernel(each, around) for each in given)
    ops = [kernel.op for kernel in found if kernel.op]
    if len(set(ops)) < len(ops):
        raise SpecError(f"an operator has two kernels ({', '.join(ops)}); give one for each")
    names = [*(k.module for k in found), *(r.name for k in found for r in k.requests)]
    twice = {name.removeprefix(USER) for name in names if names.count(name) > 1}
    if twice:
        raise SpecError(f"two kernels, or two files, are called {min(twice)}; rename one")
    return found


def read_user_kernel(given: str, around: Around = ALONE, *, guess: bool = False) -> UserKernel:
    """Return the kernels of `OP=FILE` or `FILE`; raises as `read_user_kernels`.

    guess: `FILE` alone means the operator that its only kernel, or one of several, is called by;
    where none is, its only kernel, with its variants.
    """
    name, equals, path = given.partition("=")
    op, file = (name, path) if equals else ("", name)
    if equals and op not in ROW_OPS:
        raise SpecError(f"--kernel {given}: there is no operator {op!r}; {_known()}")
    source = read_source(Path(file))
    op = op or (_guess(source, around) if guess else "")
    stem = re.sub(r"\W", "_", Path(file).stem)
    module = f"{USER}{op}_{stem}" if op else USER + stem
    if not op:
        unit = read_unit(source, around, _kernels(source, around)[1] if guess else ())
        requests = tuple(KernelRequest(module, k, {}, k) for k in kernel_names(unit))
        if not requests:
            raise SpecError(f"{file} has no kernel")
        if guess:
            unit = unroll_unit(unit)
            if len(requests) > 1:
                raise SpecError(f"{file} has {len(requests)} kernels; give a file with one")
            requests = _instances(unit, module, requests[0].name)
        return UserKernel("", file, unit, requests)
    name = f"{op}_{USER}{stem}"
    unit = fit_kernel(_pick(source, op, around), ROW_OPS[op], name, file)
    gates: tuple[KernelRequest, ...] = ()
    if op in GATE_OPS.values():
        unit = _with_pairs(unit, name, file)
        gates = _instances(unit, module, name + PAIRS)
        gates = tuple(gate for gate in gates if UNROLL not in gate.binding)  # of one panel each
    return UserKernel(op, file, unit, _instances(unit, module, name), gates)


def _instances(unit: high.Unit, module: str, name: str) -> tuple[KernelRequest, ...]:
    """Return a kernel as it stands, and its variants."""
    default = KernelRequest(module, name, {}, name)
    return (default, *_variants(default, unit.function(name)))


def _kernels(source: Source, around: Around) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what may be a kernel, of C text all that takes arrays, and what surely is no helper.

    That is what no other function of the text calls.
    """
    if is_high(source):
        names = kernel_names(read_unit(source, around))
        return names, names
    pieces = read_pieces(source, around)
    arrays, first = array_functions(pieces), uncalled_functions(pieces)
    return arrays, tuple(name for name in arrays if name in first and name != "main")


def _guess(source: Source, around: Around) -> str:
    every, first = _kernels(source, around)
    ops = [name for name in (first if len(first) == 1 else every) if name in ROW_OPS]
    if len(ops) > 1:
        raise SpecError(f"say which operator {source.name} computes, as OP=FILE; {_known()}")
    return ops[0] if ops else ""


def _known() -> str:
    return f"choose one of {', '.join(ROW_OPS)}"


def _pick(source: Source, op: str, around: Around) -> high.Unit:
    """Return a unit whose last function is the kernel of a file that is meant for an operator."""
    every, names = _kernels(source, around)
    if op not in every and len(names) != 1:
        raise SpecError(
            f"{source.name} has several kernels and none is named {op}: {', '.join(names)}; rename "
            f"one to {op}, or keep one kernel per file"
            if names
            else f"{source.name} has no kernel; write one named {op}"
        )
    chosen = op if op in every else names[0]
    unit = read_unit(source, around, (chosen,))
    kernels = kernel_names(unit)
    kept = tuple(f for f in unit.functions if f.name not in kernels)
    return high.Unit(functions=(*kept, unit.function(chosen)))


# ---- fitting to an operator's slots ----


def fit_kernel(unit: high.Unit, op: RowOp, name: str, file: str) -> high.Unit:
    """Return a unit with the kernel `name`, which calls the last one of `unit` for each row.

    A kernel that has the operator's own parameters is taken as it is. UNROLL, how many vectors a
    loop takes at a time, joins its tunables. Raises SpecError where it does not fit.
    """
    kernel = unroll_kernel(unit.functions[-1])
    helpers = unit.functions[:-1]
    own = ["T", "H", *(s.name for s in op.slots if s.name not in "TH"), "tid", "nth"]
    if [p.name for p in kernel.params] == own:
        made = replace(kernel, name=name)
        return _checked(high.Unit(functions=(*helpers, made)), file)
    if any(isinstance(n, high.Return) for n in kernel.walk()):
        raise SpecError(f"{file}: {kernel.name} returns before its end; write it with conditions")
    row = replace(kernel, kind="inline", name=_free(ROW, unit), tunables=(), doc="")
    wrapper = parse_high(Source(file, _wrapper(kernel, op, name, row.name, file)))
    made = replace(wrapper.functions[0], tunables=kernel.tunables)
    return _checked(high.Unit(functions=(*helpers, row, made)), file)


def _with_pairs(unit: high.Unit, name: str, file: str) -> high.Unit:
    """Return a unit that also has a fitted gate for rows of a product: see IN_PAIRS."""
    kernel = unit.function(name)
    integer = NamedType(name="i64")
    params = tuple(replace(p, type=integer) if p.name in _TEAM else p for p in kernel.params)
    rows = _free(ROWS, unit)
    inline = replace(kernel, kind="inline", name=rows, params=params, tunables=(), doc="")
    text = IN_PAIRS.format(name=name + PAIRS, rows=rows)
    (pairs,) = parse_high(Source(file, text)).functions
    made = replace(pairs, tunables=kernel.tunables)
    return _checked(high.Unit(functions=(*unit.functions, inline, made)), file)


def _free(name: str, unit: high.Unit) -> str:
    """Return the name, longer where a function of the unit has it."""
    taken = {function.name for function in unit.functions}
    while name in taken:
        name += "_"
    return name


def _checked(unit: high.Unit, file: str) -> high.Unit:
    verify_high(unit, Source(f"{file} (fitted)", print_high(unit)))
    return unit


def _wrapper(kernel: high.Function, op: RowOp, name: str, row: str, file: str) -> str:
    """Return the text of a kernel with the operator's slots that calls `row` for each row."""
    params = ", ".join(f"{s.name}: {TYPES.get(s.kind, 'ptr[f32]')}" for s in op.slots)
    arguments, in_place = _arguments(kernel, op, file)
    copied = (
        "        for c in vrange(0, H):\n"
        "            vstore(out + t * ldo + c, vload(x + t * ldx + c))\n"
    )
    return (
        f"@kernel\ndef {name}({params}, tid: thread, nth: thread):\n"
        "    for t in range(T * tid // nth, T * (tid + 1) // nth):\n"
        f"{copied if in_place else ''}        {row}({', '.join(arguments)})\n"
    )


def _arguments(kernel: high.Function, op: RowOp, file: str) -> tuple[list[str], bool]:
    """Return what each parameter is given, and whether the kernel works on x in place.

    The array that is written is `out`; the others are found by their names, then by their order.
    """
    written = written_pointers(kernel.body)
    arrays = [p for p in kernel.params if isinstance(p.type, PointerType)]
    outs = [p.name for p in arrays if p.name in written]
    reads = [p.name for p in arrays if p.name not in written]
    in_place = len(outs) == 1 and len(reads) == len(op.arrays) - 1
    open_slots = [s for s in op.arrays if not (in_place and s == "x")]
    rows = {s.name for s in op.slots if s.kind in ("in", "out")}
    others = [p for p in kernel.params if not isinstance(p.type, PointerType)]
    integers = [p for p in others if p.type == NamedType(name="i64")]
    numbers = [p for p in others if p.type == NamedType(name="f32")]
    takes_eps = any(s.kind == "float" for s in op.slots)
    if (
        len(outs) != 1
        or len(reads) != len(open_slots)
        or len(integers) != 1
        or len(numbers) > takes_eps
        or len(integers) + len(numbers) != len(others)
    ):
        wanted = ", ".join(f"float *{s}" for s in (*open_slots, "out"))
        raise SpecError(
            f"{file}: {kernel.name}({', '.join(p.name for p in kernel.params)}) does not fit: one "
            f"row of this operator is {wanted}, an integer that is its length"
            f"{', and at most one float, eps' if takes_eps else ''}"
        )
    given: dict[str, str] = {integers[0].name: "H", outs[0]: "out"}
    for slot in list(open_slots):
        match = [r for r in reads if re.match(NAMED[slot], r) and r not in given]
        if len(match) == 1:
            given[match[0]] = slot
            open_slots.remove(slot)
    left = iter(open_slots)
    given |= {read: next(left) for read in reads if read not in given}
    given |= {p.name: "eps" for p in numbers}

    def place(name: str) -> str:
        slot = given[name]
        return f"{slot} + t * ld{slot[0]}" if slot in rows else slot

    return [place(p.name) for p in kernel.params], in_place


def _variants(default: KernelRequest, kernel: high.Function) -> tuple[KernelRequest, ...]:
    """Return the instances beside the default: each tunable's other choices, one at a time."""
    return tuple(
        change_tiles(default, {tunable.name: choice})
        for tunable in kernel.tunables
        for choice in tunable.choices
        if choice != tunable.default and isinstance(choice, int)
    )


# ---- searching ----


def our_request(op: str, target: Target) -> KernelRequest | None:
    """Return our own kernel for an operator, None where there is none or it is part of others."""
    ours = ROW_OPS[op].ours if op else None
    return kernel_request(ours[0], target, ours[1]) if ours else None


def user_tasks(
    kernel: UserKernel, target: Target, cases: Iterable[RowsCase | CallCase]
) -> list[InstanceTask]:
    """Return a search for each case: ours first, then the user's and its variants."""
    ours = our_request(kernel.op, target)
    rivals = (*((ours,) if ours else ()), *kernel.requests)
    return [InstanceTask(c, rivals, (make_schedule(),), user=kernel.file) for c in cases]


def model_cases(op: str, width: int, eps: float, plan: PhasePlan) -> tuple[RowsCase, ...]:
    """Return the cases that stand for an operator of a model under a plan."""
    return tuple(
        RowsCase(kind=op, rows=n, width=width, eps=eps, threads=plan.threads, cpus=plan.cpus)
        for n in SIZES
    )


def user_library(kernels: Iterable[UserKernel], target: Target) -> LibrarySpec:
    """Return the library of the users' kernels, and of ours beside them."""
    kernels = tuple(kernels)
    ours = (our_request(kernel.op, target) for kernel in kernels if kernel.op)
    by_name = {request.name: request for request in ours if request is not None}
    requests = (*by_name.values(), *(r for k in kernels for r in k.requests))
    modules = {kernel.module: kernel.unit for kernel in kernels}
    return LibrarySpec(target, requests, name="user", modules=modules, tvm_ffi=False)


def check_in_models(kernels: Iterable[UserKernel], spec: ModelSpec) -> None:
    """Raise SpecError for an operator that the model does not have, or not apart."""
    known = model_ops(spec)
    for kernel in kernels:
        if kernel.op and kernel.op not in known:
            raise SpecError(
                f"this model has no separate operator {kernel.op}, so it cannot be replaced; "
                f"replaceable: {', '.join(known) or 'none'}. Give the file without {kernel.op}= to "
                "call its kernels with dovetail.kernels"
            )
