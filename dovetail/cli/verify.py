"""`dovetail verify`: is an artifact undamaged, within its limits, and does it run on this machine?

In: an artifact directory. Out: a report; exit code 1 where it has faults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dovetail.cli.options import ArtifactDirectory, AsJson
from dovetail.cli.report import CHECK_FAILED, show_bytes, show_count, show_report

if TYPE_CHECKING:
    from dovetail.runtime.verify import VerifyReport


def verify_command(artifact: ArtifactDirectory, json: AsJson = False) -> None:
    """Check an artifact: hashes of all files and weights, limits, and whether it runs here."""
    from dovetail.runtime.artifact import check_folder
    from dovetail.runtime.verify import verify_artifact

    check_folder(artifact)
    report = verify_artifact(artifact)
    show_report(report, _describe, json=json)
    if not report.ok:
        raise typer.Exit(CHECK_FAILED)


def _describe(report: VerifyReport) -> str:
    count = show_count(len(report.faults), "fault")
    verdict = "OK: hashes match; compatible with this machine" if report.ok else count
    size = f"{report.files} files, {show_bytes(report.bytes)}"
    return "\n".join(
        (*(f"FAULT {fault}" for fault in report.faults), f"{report.path}: {size}: {verdict}")
    )
