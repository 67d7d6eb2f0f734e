"""The typer application: the table of verbs, and the entry point of the console script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from dovetail import __version__
from dovetail.cli.compile import compile_command
from dovetail.cli.inspect import inspect_command
from dovetail.cli.kernel import build_command, check_command, lift_command
from dovetail.cli.quickstart import quickstart_command
from dovetail.cli.report import INTERRUPTED
from dovetail.cli.run import run_command
from dovetail.cli.verify import verify_command

HELP = """Compile a model into one artifact of native kernels and plans, and run it.

Exit codes: 0 done, 1 a check failed, 2 bad input or environment, 130 interrupted.
"""

app = typer.Typer(
    help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)
kernels = typer.Typer(help="The kernel languages on a kernel of your own.", no_args_is_help=True)

VERBS: dict[str, Callable[..., None]] = {
    "compile": compile_command,
    "run": run_command,
    "inspect": inspect_command,
    "verify": verify_command,
    "quickstart": quickstart_command,
}
KERNEL_VERBS: dict[str, Callable[..., None]] = {
    "check": check_command,
    "lift": lift_command,
    "build": build_command,
}

for _name, _verb in VERBS.items():
    app.command(_name)(_verb)
for _name, _verb in KERNEL_VERBS.items():
    kernels.command(_name)(_verb)
app.add_typer(kernels, name="kernel")


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"dovetail {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the exit code says what happened (see HELP)."""
    try:
        app(prog_name="dovetail")
    except KeyboardInterrupt:
        print("dovetail: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
