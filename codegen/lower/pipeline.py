"""The whole of lowering on one page: a kernel, a binding and a target in, a C-like unit out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dovetail.codegen.isa.target import Target
from dovetail.codegen.lower.dead import drop_dead
from dovetail.codegen.lower.fold import fold_type
from dovetail.codegen.lower.helpers import collect_helpers
from dovetail.codegen.lower.inline import expand_calls
from dovetail.codegen.lower.names import Names, new_name, rebuild_body
from dovetail.codegen.lower.select import select
from dovetail.codegen.lower.tiles import expand_tiles
from dovetail.codegen.lower.unroll import unroll_body
from dovetail.codegen.lower.vrange import split_vranges
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import Expr, Int, Name
from dovetail.ir.high.nodes import Function, Text, Unit
from dovetail.ir.high.scopes import defined_names
from dovetail.ir.low import nodes as low


def lower(
    unit: Unit, kernel: str, binding: Mapping[str, int | str], target: Target, *, name: str
) -> low.Unit:
    """Return `kernel` bound and lowered for `target` as the C function `name`, after its helpers.

    Tunables missing in `binding` take their defaults. ScheduleError: unknown kernel or tunable, a
    value outside its choices, or a binding under which bounds, tile indices or types make no sense.
    """
    flat, names = flatten(unit, kernel, binding, target, name=name)
    lowered = select(flat, target, names, name)
    return low.Unit(items=(*collect_helpers(lowered, target), lowered))


def flatten(
    unit: Unit, kernel: str, binding: Mapping[str, int | str], target: Target, *, name: str
) -> tuple[Function, Names]:
    """Return `kernel` without tunables, tiles, inline calls, `unroll` and `vrange`.

    Only the choice of instructions is left, which each backend makes. Raises as `lower` does.
    """
    function = find_kernel(unit, kernel)
    values = bind_tunables(function, binding, target)
    names = Names({name, *values})
    function = name_locals(function, values, names)
    function = expand_calls(unit, function, names)
    body = unroll_body(function.body, values, names)
    body = expand_tiles(body, names)
    body = split_vranges(body, target.lanes, names)
    return replace(function, body=drop_dead(body)), names


def find_kernel(unit: Unit, kernel: str) -> Function:
    """Return the @kernel function called `kernel`."""
    kernels = {f.name: f for f in unit.functions if f.kind == "kernel"}
    if kernel not in kernels:
        known = ", ".join(sorted(kernels)) or "none"
        raise ScheduleError(f"there is no kernel `{kernel}`; the module has: {known}")
    return kernels[kernel]


def bind_tunables(
    function: Function, binding: Mapping[str, int | str], target: Target
) -> dict[str, Expr]:
    """Return the value of every compile-time name: tunables as bound or by default, and VL."""
    known = {tunable.name: tunable for tunable in function.tunables}
    for name, value in binding.items():
        if name not in known:
            raise ScheduleError(f"`{function.name}` has no tunable `{name}`")
        if value not in known[name].choices:
            choices = ", ".join(map(str, known[name].choices))
            raise ScheduleError(f"`{name}` = {value!r} is none of its choices: {choices}")
    bound = {name: binding.get(name, tunable.default) for name, tunable in known.items()}
    values: dict[str, Expr] = {name: _constant(value) for name, value in bound.items()}
    return {**values, "VL": Int(value=target.lanes)}


def _constant(value: int | str) -> Expr:
    return Text(value=value) if isinstance(value, str) else Int(value=value)


PLAIN_TYPES = dict.fromkeys(("sched", "thread"), Name(id="i64"))
"""Types that only say where a parameter's value comes from, and what they are in C's eyes."""


def name_locals(function: Function, values: Mapping[str, Expr], names: Names) -> Function:
    """Return `function` with its parameters' types bound and its variables named as C allows."""
    params = [p.name for p in function.params]
    own = [*params, *sorted(defined_names(function.body) - set(params))]
    env: dict[str, Expr] = {name: Name(id=names.fresh(name)) for name in own}
    types = {**values, **PLAIN_TYPES}
    renamed = tuple(
        replace(p, name=new_name(p.name, env), type=fold_type(p.type, types))
        for p in function.params
    )
    return replace(function, params=renamed, body=rebuild_body(function.body, env))
