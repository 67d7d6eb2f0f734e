"""How the weights of a model are stored: as asked for, as the checkpoint has them, or `auto`.

In: what was asked, the checkpoint's dtype, the target. Out: the name of a format, and why.
"""

from __future__ import annotations

from dovetail.codegen.isa.target import Target
from dovetail.ir.errors import SpecError
from dovetail.ir.formats import FORMATS

AUTO = "auto"
CHOICES = {"f32": "f32", "bf16": "bf16", "int8": "q8_32", "int4": "q4_32"}
"""What may be asked for -> the format it means; the last two quantise."""
QUANTISING = ("int8", "int4")


def resolve_weight_dtype(wanted: str | None, stored: str, target: Target | None) -> str:
    """Return the weight format of a model.

    wanted: one of CHOICES, or `auto`, which None is, too. stored: what the checkpoint's matrices
    are: a float dtype or a quantised format. target: the first one of a compile, or None where
    only dimensions matter.

    `auto` never quantises. What has a format narrower than float32 keeps it, quantised or bfloat16:
    a wider one would hold the same values. Others become bfloat16 where the target multiplies it in
    hardware, else float32.

    Raises SpecError for a name that is none of these.
    """
    if wanted in CHOICES:
        return CHOICES[wanted]
    if wanted not in (None, AUTO):
        names = ", ".join((AUTO, *CHOICES))
        raise SpecError(f"weight dtype {wanted!r} is not supported; choose one of {names}")
    if stored in FORMATS and stored != "f32":
        return stored
    return "bf16" if target is not None and target.rounds_rows else "f32"


def describe_weight_dtype(name: str, chosen: str, stored: str, target: Target) -> str:
    """Return in one line what `auto` has chosen for a model, and why."""
    if chosen == stored:
        why = "as the checkpoint has them"
    elif chosen == "bf16":
        why = f"which {target.name} multiplies in hardware; the checkpoint has {stored}"
    else:
        why = f"since {target.name} has no products of bfloat16; the checkpoint has {stored}"
    return f"weights of {name} are {chosen}, {why} (--weight-dtype auto)"
