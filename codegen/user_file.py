"""Kernel files of a user's own: `.dk` text, or C that is lifted, with what stands around it.

In: a path, texts before it and folders of headers. Out: a verified high-IR unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from dovetail.codegen.catalog import kernel_source
from dovetail.codegen.lift.lift import lift_function
from dovetail.ir.diagnostics import Diagnostic, Source
from dovetail.ir.errors import SpecError, SyntaxDiagnostic
from dovetail.ir.high import nodes as high
from dovetail.ir.high.print import print_high
from dovetail.ir.high.verify import load_modules
from dovetail.ir.low.lex import token_span
from dovetail.ir.low.parse import Pieces

MAX_TEXT_BYTES = 8 << 20
HIGH_SUFFIX = ".dk"


@dataclass(frozen=True)
class Around:
    """What stands around a C file: texts read before it, and folders of what it includes."""

    preludes: tuple[Source, ...] = ()
    folders: tuple[Path, ...] = ()

    def find(self, name: str) -> str | None:
        """Return the text of a header.

        None where no folder has it: the tables of this package know it, or its lack is met where
        something of it is used.
        """
        found = next((f / name for f in self.folders if (f / name).is_file()), None)
        return read_source(found).text if found is not None else None


def read_source(path: Path) -> Source:
    """Return the text of `path`; SpecError where it is missing, huge or no UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_TEXT_BYTES:
        raise SpecError(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MiB; give a smaller file")
    try:
        return Source(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text (byte {error.start})") from None


def read_around(
    preludes: Sequence[str | Path] | None, folders: Sequence[str | Path] | None
) -> Around:
    """Return what a file needs around it: the texts of preludes, folders of headers."""
    texts = tuple(read_source(Path(path)) for path in preludes or ())
    return Around(texts, tuple(map(Path, folders or ())))


def read_pieces(source: Source, around: Around) -> Pieces:
    """Return C text as pieces to parse one by one, after its preludes.

    Raises SyntaxDiagnostic where a condition leaves no function of the text.
    """
    pieces = Pieces()
    for text in (*around.preludes, source):
        pieces.add(text, around.find)
    if not pieces.own and pieces.dropped:
        place = token_span(pieces.dropped[0])
        message = "no function is left of this text: the condition here is false"
        hint = "define what it asks for in a --prelude"
        raise SyntaxDiagnostic([Diagnostic("low-empty", message, place, source, hint)])
    return pieces


def read_unit(source: Source, around: Around, functions: tuple[str, ...] = ()) -> high.Unit:
    """Return a file's kernels as verified high IR with what they import; C text is lifted.

    functions: of C text, those to lift, as of `lift_source`.
    """
    if not is_high(source):
        lifted = lift_source(source, around, functions)
        source = Source(f"{source.name} (lifted)", print_high(lifted))
    return load_modules(source, kernel_source)


def is_high(source: Source) -> bool:
    """Return whether a source is high IR, by its name."""
    return source.name.endswith(HIGH_SUFFIX)


def kernel_names(unit: high.Unit) -> tuple[str, ...]:
    """Return the names of a unit's @kernel functions, in order."""
    return tuple(f.name for f in unit.functions if f.kind == "kernel")


def lift_source(source: Source, around: Around, functions: tuple[str, ...] = ()) -> high.Unit:
    """Return the high IR of C functions, by default of those that no other of the text calls.

    Raises:
        SyntaxDiagnostic: the text is wrong.
        SpecError: a function is not there or has no high form.
    """
    if is_high(source):
        raise SpecError(f"{source.name} is high IR already; only C text can be lifted")
    pieces = read_pieces(source, around)
    names = functions or uncalled_functions(pieces)
    lifted = [lift_function(pieces, name) for name in names]
    if not lifted:
        raise SpecError(f"{source.name} has no function to lift")
    return high.Unit(
        functions=tuple({f.name: f for one in lifted for f in one.functions}.values()),
        imports=tuple(dict.fromkeys(name for one in lifted for name in one.imports)),
        notes=tuple(dict.fromkeys(note for one in lifted for note in one.notes)),
    )


def uncalled_functions(pieces: Pieces) -> tuple[str, ...]:
    """Return the functions of a C text that no other function of it calls, in order.

    They are not parsed, so that what is no C of ours beside them does not matter.
    """
    bodies = {name: pairwise(pieces.functions[name][1]) for name in pieces.own}
    called = {str(a) for name, body in bodies.items() for a, b in body if b == "(" and a != name}
    return tuple(name for name in pieces.own if name not in called)


def array_functions(pieces: Pieces) -> tuple[str, ...]:
    """Return the functions of a C text that take an array, in order."""
    heads = {name: takewhile("{".__ne__, pieces.functions[name][1]) for name in pieces.own}
    return tuple(name for name, head in heads.items() if {"*", "["} & {str(t) for t in head})
