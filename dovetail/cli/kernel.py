"""`dovetail kernel check|lift|build`: the kernel languages on a kernel of a user's own.

In: a `.dk` file (high IR) or C text (low IR). Out: diagnostics, high IR text, or a built library.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dovetail.cli.options import AsJson, IncludeOption, PreludeOption
from dovetail.cli.report import CHECK_FAILED, check_file, show_report, writing
from dovetail.errors import ScheduleError, SpecError, SyntaxDiagnostic
from dovetail.ir.diagnostics import Diagnostic
from dovetail.ir.files import write_whole
from dovetail.ir.node import no_collector

if TYPE_CHECKING:
    from dovetail.codegen.isa.target import Target
    from dovetail.codegen.library import BuiltLibrary
    from dovetail.codegen.user_file import Around
    from dovetail.ir.diagnostics import Source
    from dovetail.ir.high import nodes as high

FileArgument = Annotated[Path, typer.Argument(help="A .dk file, or C text.")]
TargetOption = Annotated[str | None, "Target: a CPU's, or cuda; default this machine's."]


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
    from dovetail.codegen.user_file import is_high, read_around, read_source

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
    from dovetail.codegen.user_file import lift_source, read_around, read_source
    from dovetail.ir.high.print import print_high

    if output is not None:
        check_file(output)
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
    from dovetail.codegen.lift.unroll import UNROLL, unroll_unit
    from dovetail.codegen.targets import get_target, host_target
    from dovetail.codegen.user_file import kernel_names, read_around, read_source, read_unit

    with half_library(output):
        pass  # before the work that it would be in vain after
    source, binding = read_source(file), parse_binding(bind or [])
    unit = read_unit(source, read_around(prelude, include), tuple(kernel or ()))
    unit = unroll_unit(unit) if UNROLL in binding else unit
    names = tuple(kernel or kernel_names(unit))
    if not names:
        raise SpecError(f"{file} has no @kernel function to build")
    machine = host_target() if target is None else get_target(target)
    built = build_kernels(unit, names, binding, machine, file.stem)
    with half_library(output) as work:
        write_library(built, work, output)
    print(f"{output}: {built.path.name} for {built.index.target}: {', '.join(names)}")


def check_kernels(source: Source, around: Around | None, target: str | None) -> tuple[str, ...]:
    """Parse, verify and (given a target) lower; return the names of the functions.

    Raises:
        SyntaxDiagnostic: the text is wrong.
        ScheduleError: it cannot be lowered with its default parameters.
        SpecError: a target is given, and the text is C that has no high form.
    """
    from dovetail.codegen.lower import lower
    from dovetail.codegen.targets import get_target
    from dovetail.codegen.user_file import Around, is_high, kernel_names, read_unit

    around = around or Around()
    with no_collector():
        names = () if is_high(source) else check_low(source, around)
        if target is not None or is_high(source):
            unit = read_unit(source, around)
            names = names or kernel_names(unit)
            if target is not None:
                for name in kernel_names(unit):
                    lower(unit, name, {}, get_target(target), name=name)
    return names


def check_low(source: Source, around: Around) -> tuple[str, ...]:
    """Return the names of the functions of C text; every fault of any one is raised."""
    from dovetail.codegen.isa.signatures import known_constants, known_functions
    from dovetail.codegen.targets import TARGETS
    from dovetail.codegen.user_file import read_pieces
    from dovetail.ir.low.nodes import Function
    from dovetail.ir.low.parse import parse_low
    from dovetail.ir.low.verify import verify_low

    defines = "\n".join(prelude.text for prelude in around.preludes)
    unit = parse_low(source, defines=defines, include=around.find)
    if not unit.items:
        read_pieces(source, around)  # says what is not there
    targets = list(TARGETS.values())
    functions, constants = known_functions(targets), known_constants(targets)
    verify_low(unit, source, functions=functions, constants=constants)
    return tuple(item.name for item in unit.items if isinstance(item, Function))


def parse_binding(pairs: Iterable[str]) -> dict[str, int | str]:
    """Return tunables from `NAME=VALUE` options; whole numbers become integers."""
    binding: dict[str, int | str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise SpecError(f"--set {pair!r} must be NAME=VALUE")
        binding[name] = value
        with suppress(ValueError):
            binding[name] = int(value)
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


@contextmanager
def half_library(output: Path) -> Iterator[Path]:
    """Yield a new directory beside `output`, where a library is made; it is removed after.

    Raises:
        SpecError: `output` cannot be written, or exists and is no directory this command wrote.
    """
    from dovetail.compiler.write.writer import half_made

    if output.exists() and not (output / "index.json").is_file():
        raise SpecError(f"{output} exists and is not a kernel library; choose another directory")
    target = output.absolute()
    with writing(output):
        target.parent.mkdir(parents=True, exist_ok=True)
        with half_made(target.parent, f".{target.name}.") as folder:
            work = folder / "library"
            work.mkdir()
            yield work


def write_library(built: BuiltLibrary, work: Path, output: Path) -> None:
    """Write library, C text and index to `work`, which then takes the place of `output`."""
    from dovetail.compiler.write.writer import replace_folder

    shutil.copy(built.path, work / built.index.library)
    (work / built.index.source).write_text(built.source, encoding="utf-8")
    index = msgspec.json.format(msgspec.json.encode(built.index), indent=1)
    (work / "index.json").write_bytes(index + b"\n")
    replace_folder(work, output.absolute())


def _fault(found: Diagnostic) -> Fault:
    return Fault(
        code=found.code,
        message=found.message,
        line=found.span.line,
        column=found.span.column,
        hint=found.hint,
    )
