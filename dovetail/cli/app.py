"""The typer application: the table of verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from dovetail import __version__
from dovetail.cli.bench import offload_command, profile_command
from dovetail.cli.bench_embed import embed_command
from dovetail.cli.bench_perplexity import perplexity_command
from dovetail.cli.bench_serve import serve_bench_command
from dovetail.cli.cache import cache_clear_command, cache_list_command
from dovetail.cli.compile import compile_command
from dovetail.cli.index import index_build_command
from dovetail.cli.inspect import inspect_command
from dovetail.cli.kernel import build_command, check_command, lift_command
from dovetail.cli.options import declare_options
from dovetail.cli.quickstart import quickstart_command
from dovetail.cli.report import report_errors
from dovetail.cli.run import run_command
from dovetail.cli.serve import ENV, serve_command
from dovetail.cli.topo import topo_command
from dovetail.cli.tune import tune_command
from dovetail.cli.verify import verify_command

HELP = """Compile a model into one artifact of native kernels and plans, and run it.

Exit codes: 0 success, 1 a check failed, 2 bad input, bad environment or interrupted.
"""

app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "kernel": (
        "Check, lift and build kernels of your own.",
        {"check": check_command, "lift": lift_command, "build": build_command},
    ),
    "index": ("Build indexes for retrieval.", {"build": index_build_command}),
    "cache": (
        "List and clear what was compiled, built and measured on this machine.",
        {"list": cache_list_command, "clear": cache_clear_command},
    ),
    "bench": (
        "Benchmark serving, measured or simulated.",
        {
            "offload": offload_command,
            "profile": profile_command,
            "embed": embed_command,
            "perplexity": perplexity_command,
            "serve": serve_bench_command,
        },
    ),
}
VERBS: dict[str, Callable[..., None]] = {
    "compile": compile_command,
    "tune": tune_command,
    "run": run_command,
    "serve": serve_command,
    "inspect": inspect_command,
    "verify": verify_command,
    "topo": topo_command,
    "quickstart": quickstart_command,
}

for _name, _verb in VERBS.items():
    _environment = {"auto_envvar_prefix": ENV} if _verb is serve_command else {}
    app.command(_name, context_settings=_environment)(report_errors(declare_options(_verb)))
for _group, (_help, _verbs) in GROUPS.items():
    _inner = typer.Typer(help=_help, no_args_is_help=True)
    for _name, _verb in _verbs.items():
        _inner.command(_name)(report_errors(declare_options(_verb)))
    app.add_typer(_inner, name=_group)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dovetail {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the verb."""
