"""`dovetail kernel check|lift|build`: the kernel languages on a kernel of a user's own.

In: a `.dk` file (high IR) or C text (low IR). Out: diagnostics, high IR text, or a built library.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dovetail.cli.options import AsJson
from dovetail.cli.report import CHECK_FAILED, show_report, writing
from dovetail.errors import ScheduleError, SpecError, SyntaxDiagnostic
from dovetail.ir.diagnostics import Diagnostic, Source
from dovetail.ir.files import write_whole

if TYPE_CHECKING:
    from dovetail.codegen.isa.target import Target
    from dovetail.codegen.library import BuiltLibrary
    from dovetail.ir.high import nodes as high
    from dovetail.ir.low import nodes as low
    from dovetail.ir.low.parse import Pieces

MAX_TEXT_BYTES = 8 << 20
HIGH_SUFFIX = ".dk"

FileArgument = Annotated[Path, typer.Argument(help="A .dk file, or C text.")]
TargetOption = Annotated[str | None, "Target: a CPU's, or cuda; default this machine's."]
PreludeOption = Annotated[
    list[Path] | None, "C text with macros and types that the file needs; repeatable."
]
IncludeOption = Annotated[
    list[Path] | None, typer.Option("-I", help="Folder of headers to include; repeatable.")
]


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


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One diagnostic as JSON shows it; line and column are 0 where it has no place."""

    code: str
    message: str
    line: int = 0
    column: int = 0
    hint: str | None = None


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kernel check --json` prints."""

    file: str
    language: str
    ok: bool
    kernels: tuple[str, ...]
    faults: tuple[Fault, ...]


def check_command(
    file: FileArgument,
    target: TargetOption = None,
    prelude: PreludeOption = None,
    include: IncludeOption = None,
    json: AsJson = False,
) -> None:
    """Parse and verify a kernel; with --target also lower it. Exit code 1 where it has faults."""
    source, around = read_source(file), read_around(prelude, include)
    language = "high IR" if is_high(source) else "low IR"
    kernels: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    shown = ""
    try:
        kernels = check_kernels(source, around, target)
    except SyntaxDiagnostic as error:
        shown, faults = str(error), tuple(map(_fault, error.diagnostics))
    except ScheduleError as error:
        shown, faults = str(error), (Fault(code="schedule", message=str(error)),)
    report = CheckReport(
        file=str(file), language=language, ok=not faults, kernels=kernels, faults=faults
    )
    done = f"{file}: {language}, no faults: {', '.join(kernels)}"
    show_report(report, lambda _: shown or done, json=json)
    if faults:
        raise typer.Exit(CHECK_FAILED)


def lift_command(
    file: FileArgument,
    prelude: PreludeOption = None,
    include: IncludeOption = None,
    function: Annotated[
        list[str] | None,
        "Lift only this function; repeatable. Default: all that no other one calls.",
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The .dk file to write.")
    ] = None,
) -> None:
    """Lift C with the intrinsics of one instruction set to high IR, for every target."""
    from dovetail.ir.high.print import print_high

    source, around = read_source(file), read_around(prelude, include)
    text = print_high(lift_source(source, around, tuple(function or ())))
    if output is None:
        print(text, end="")
    else:
        with writing(output):
            write_whole(output, text.encode())


def build_command(
    file: FileArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")],
    target: TargetOption = None,
    prelude: PreludeOption = None,
    include: IncludeOption = None,
    kernel: Annotated[list[str] | None, "Build only this kernel; repeatable."] = None,
    bind: Annotated[
        list[str] | None, typer.Option("--set", help="Value of a tunable, NAME=VALUE; repeatable.")
    ] = None,
) -> None:
    """Build a library of a file's kernels: C text, shared library, index.json."""
    source = read_source(file)
    unit = read_unit(source, read_around(prelude, include))
    names = tuple(kernel or kernel_names(unit))
    if not names:
        raise SpecError(f"{file} has no @kernel function to build")
    built = build_kernels(unit, names, parse_binding(bind or []), choose_target(target), file.stem)
    write_library(built, output)
    print(f"{output}: {built.path.name} for {built.index.target}: {', '.join(names)}")


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


def check_kernels(source: Source, around: Around | None, target: str | None) -> tuple[str, ...]:
    """Parse, verify and (given a target) lower; return the names of the functions.

    Raises:
        SyntaxDiagnostic: the text is wrong.
        ScheduleError: it cannot be lowered with its default parameters.
        SpecError: a target is given, and the text is C that has no high form.
    """
    from dovetail.codegen.lower import lower

    around = around or Around()
    with _no_collector():
        names = () if is_high(source) else check_low(source, around)
        if target is not None or is_high(source):
            unit = read_unit(source, around)
            names = names or kernel_names(unit)
            if target is not None:
                for name in kernel_names(unit):
                    lower(unit, name, {}, choose_target(target), name=name)
    return names


@contextmanager
def _no_collector() -> Iterator[None]:
    """Pause Python's cycle collector: trees have no cycles, and its work grows with each node."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def check_low(source: Source, around: Around) -> tuple[str, ...]:
    """Parse and verify C text; return the names of its functions."""
    from dovetail.ir.low.nodes import Function

    unit = read_low(source, around)
    return tuple(item.name for item in unit.items if isinstance(item, Function))


def read_around(preludes: Sequence[Path] | None, folders: Sequence[Path] | None) -> Around:
    """Return what a file needs around it: the texts of preludes, folders of headers."""
    return Around(tuple(map(read_source, preludes or ())), tuple(folders or ()))


def read_pieces(source: Source, around: Around) -> Pieces:
    """Return C text as pieces to parse one by one, after its preludes.

    Raises SyntaxDiagnostic where a condition leaves no function of the text.
    """
    from dovetail.ir.low.lex import token_span
    from dovetail.ir.low.parse import Pieces

    pieces = Pieces()
    for text in (*around.preludes, source):
        pieces.add(text, around.find)
    if not pieces.own and pieces.dropped:
        place = token_span(pieces.dropped[0])
        message = "no function is left of this text: the condition here is false"
        hint = "define what it asks for in a --prelude"
        raise SyntaxDiagnostic([Diagnostic("low-empty", message, place, source, hint)])
    return pieces


def read_low(source: Source, around: Around) -> low.Unit:
    """Return the verified unit of C text; every fault of any function is raised."""
    from dovetail.codegen.isa.signatures import known_constants, known_functions
    from dovetail.codegen.targets import TARGETS
    from dovetail.ir.low.parse import parse_low
    from dovetail.ir.low.verify import verify_low

    defines = "\n".join(prelude.text for prelude in around.preludes)
    unit = parse_low(source, defines=defines, include=around.find)
    if not unit.items:
        read_pieces(source, around)  # says what is not there
    targets = list(TARGETS.values())
    functions, constants = known_functions(targets), known_constants(targets)
    verify_low(unit, source, functions=functions, constants=constants)
    return unit


def read_unit(source: Source, around: Around) -> high.Unit:
    """Return a file's kernels as verified high IR with what they import; C text is lifted."""
    from dovetail.codegen.catalog import kernel_source
    from dovetail.ir.high.print import print_high
    from dovetail.ir.high.verify import load_modules

    if not is_high(source):
        lifted = lift_source(source, around)
        source = Source(f"{source.name} (lifted)", print_high(lifted))
    return load_modules(source, kernel_source)


def is_high(source: Source) -> bool:
    """Return whether a source is high IR, by its name."""
    return source.name.endswith(HIGH_SUFFIX)


def kernel_names(unit: high.Unit) -> tuple[str, ...]:
    """Return the names of a unit's @kernel functions, in order."""
    return tuple(f.name for f in unit.functions if f.kind == "kernel")


def choose_target(name: str | None) -> Target:
    """Return a target by name, this machine's best for None; SpecError lists the names."""
    from dovetail.codegen.targets import get_target, host_target

    return host_target() if name is None else get_target(name)


def parse_binding(pairs: Iterable[str]) -> dict[str, int | str]:
    """Return tunables from `NAME=VALUE` options; whole numbers become integers."""
    binding: dict[str, int | str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise SpecError(f"--set {pair!r} must be NAME=VALUE")
        binding[name] = int(value) if value.lstrip("-").isdigit() else value
    return binding


def build_kernels(
    unit: high.Unit,
    names: tuple[str, ...],
    binding: dict[str, int | str],
    target: Target,
    library: str,
) -> BuiltLibrary:
    """Build `names` of `unit`; each takes the tunables of `binding` that it has."""
    from dovetail.codegen.catalog import KernelRequest
    from dovetail.codegen.library import LibrarySpec, build_library
    from dovetail.codegen.lower import find_kernel

    tunables = {name: {t.name for t in find_kernel(unit, name).tunables} for name in names}
    unknown = set(binding) - set().union(*tunables.values())
    if unknown:
        raise SpecError(f"no kernel of the file has a tunable {', '.join(sorted(unknown))}")
    requests = tuple(
        KernelRequest(
            library, name, {k: v for k, v in binding.items() if k in tunables[name]}, name
        )
        for name in names
    )
    return build_library(
        LibrarySpec(target, requests, name=library, modules={library: unit}, team=False)
    )


def write_library(built: BuiltLibrary, output: Path) -> None:
    """Write library, C text and index to the directory `output`, all or nothing.

    Raises:
        SpecError: `output` exists and is no directory this command wrote.
    """
    if output.exists() and not (output / "index.json").is_file():
        raise SpecError(f"{output} exists and is not a kernel library; choose another directory")
    with writing(output), ExitStack() as stack:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.")
        )
        work = Path(folder) / "library"
        work.mkdir()
        shutil.copy(built.path, work / built.index.library)
        (work / built.index.source).write_text(built.source, encoding="utf-8")
        index = msgspec.json.format(msgspec.json.encode(built.index), indent=1)
        (work / "index.json").write_bytes(index + b"\n")
        if output.exists():
            output.rename(Path(folder) / "old")
        work.rename(output)


def lift_source(source: Source, around: Around, functions: tuple[str, ...] = ()) -> high.Unit:
    """Return the high IR of C functions, by default of those that no other of the text calls.

    Raises:
        SyntaxDiagnostic: the text is wrong.
        SpecError: a function is not there or has no high form.
    """
    if is_high(source):
        raise SpecError(f"{source.name} is high IR already; only C text can be lifted")
    from dovetail.codegen.lift.lift import lift_function
    from dovetail.ir.high.nodes import Unit

    pieces = read_pieces(source, around)
    names = functions or uncalled_functions(pieces)
    lifted = [lift_function(pieces, name) for name in names]
    if not lifted:
        raise SpecError(f"{source.name} has no function to lift")
    return Unit(
        functions=tuple({f.name: f for one in lifted for f in one.functions}.values()),
        imports=tuple(dict.fromkeys(name for one in lifted for name in one.imports)),
        notes=tuple(dict.fromkeys(note for one in lifted for note in one.notes)),
    )


def uncalled_functions(pieces: Pieces) -> tuple[str, ...]:
    """Return the functions of a C text that no other function of it calls, in order."""
    from dovetail.ir.expr import Call

    calls = [n.name for f in pieces.own for n in pieces.function(f).walk() if isinstance(n, Call)]
    return tuple(name for name in pieces.own if name not in calls)


def _fault(found: Diagnostic) -> Fault:
    return Fault(
        code=found.code,
        message=found.message,
        line=found.span.line,
        column=found.span.column,
        hint=found.hint,
    )
