"""`dovetail verify`: is an artifact whole, within its limits, and does it run on this machine?

In: an artifact directory. Out: a report; exit code 1 where it has faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.report import CHECK_FAILED, print_json, report_errors, show_bytes, show_count
from dovetail.errors import ArtifactError


@report_errors
def verify_command(
    artifact: Annotated[Path, typer.Argument(help="An artifact directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check an artifact: hashes of every file and weight chunk, limits, fit to this machine."""
    from dovetail.runtime.verify import verify_artifact

    if not artifact.is_dir():
        raise ArtifactError(
            f"{artifact} is not an artifact directory; "
            f"run `dovetail compile MODEL -o {artifact}` to make one"
        )
    report = verify_artifact(artifact)
    if json:
        print_json(report)
    else:
        for fault in report.faults:
            print(f"FAULT {fault}")
        size = f"{report.files} files, {show_bytes(report.bytes)}"
        verdict = "whole, and runs here" if report.ok else show_count(len(report.faults), "fault")
        print(f"{artifact}: {size}: {verdict}")
    if not report.ok:
        raise typer.Exit(CHECK_FAILED)
