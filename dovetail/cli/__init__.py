"""The command line: one module per verb; `main` is the console script."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments` (default: the process's); ends in SystemExit."""
    logging.basicConfig(format="dovetail: %(message)s")  # as `tell` writes: what is warned of
    try:
        from dovetail.cli.app import app  # takes a moment, in which Ctrl-C may come, too

        app(args=arguments, prog_name="dovetail")
    except KeyboardInterrupt:
        print("dovetail: interrupted", file=sys.stderr)
        sys.exit(2)
