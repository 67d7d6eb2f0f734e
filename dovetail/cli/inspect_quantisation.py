"""What `dovetail inspect` says of weights that were quantised at compile.

In: a model's quantisation.json. Out: a table: kinds of matrices, their formats and errors.
"""

from __future__ import annotations

from collections import defaultdict

from rich.table import Table

from dovetail.ir.quantisation import QuantisationFile, QuantisedWeight


def quantisation_table(file: QuantisationFile) -> Table:
    """Return a row for the matrices of a kind and format, and one for each in a finer format."""
    title = "quantised here, errors of weights"
    if file.calibration is not None:
        title += f" as {file.calibration_tokens} tokens of {file.calibration} weigh them"
    table = Table(title=title, title_justify="left")
    for column in ("matrix", "format", "bound"):
        table.add_column(column)
    for column in ("matrices", "mean error", "worst error"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str], list[QuantisedWeight]] = defaultdict(list)
    for weight in file.weights:
        groups[weight.name.rpartition(".")[2], weight.format].append(weight)
    for (kind, form), found in groups.items():
        worst = max(found, key=lambda weight: weight.error)
        mean = sum(weight.error for weight in found) / len(found)
        table.add_row(
            kind, form, _show_bound(file, form), str(len(found)), f"{mean:.2%}",
            f"{worst.error:.2%} {worst.name}",
        )  # fmt: skip
    for weight in file.kept:
        why = f"{weight.wanted_error:.2%} in {weight.wanted}"
        table.add_row(weight.name, weight.format, why, "", f"{weight.error:.2%}", "")
    return table


def _show_bound(file: QuantisationFile, form: str) -> str:
    return f"{file.bounds[form]:.2%}" if form in file.bounds else ""
