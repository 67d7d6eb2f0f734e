"""The command line: one module per verb; `main` is the console script."""

from dovetail.cli.app import main

__all__ = ["main"]
