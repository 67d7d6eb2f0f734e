"""Draw the report of `kernels.py`: GFLOP/s over M, one panel per shape and thread count.

Run `python benchmarks/plot_kernels.py kernels.json docs/kernels.svg`. Each panel has our kernels,
every peer of the report, and the roofline that was measured beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS = "ours"
PANEL_INCHES = (3.4, 2.6)
STYLES = {
    OURS: {"color": "#c0392b", "linewidth": 2.0, "marker": "o", "markersize": 3},
    "torch": {"color": "#2c3e50"},
    "onednn": {"color": "#2980b9"},
    "openvino": {"color": "#8e44ad"},
    "openblas": {"color": "#7f8c8d"},
}
ROOFLINE = {"color": "black", "linewidth": 0.8, "linestyle": ":"}

Rows = list[dict[str, Any]]


def panels(rows: Rows) -> dict[tuple[int, int, int], Rows]:
    """Return the rows by (threads, N, K), each sorted by M."""
    found: dict[tuple[int, int, int], Rows] = {}
    for row in sorted(rows, key=lambda row: row["m"]):
        found.setdefault((row["threads"], row["n"], row["k"]), []).append(row)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def roofline(row: dict[str, Any]) -> float:
    """Return the GFLOP/s that the row's roofline allows."""
    return float(row["ours_gflops"] / row["roofline_fraction"])


def draw(axes: Any, title: str, rows: Rows) -> None:
    """Draw one panel."""
    m = [row["m"] for row in rows]
    axes.plot(m, [roofline(row) for row in rows], label="roofline", **ROOFLINE)
    for name, style in reversed(STYLES.items()):
        key = f"{name}_gflops"
        if key in rows[0]:
            axes.plot(m, [row[key] for row in rows], label=name, **{"linewidth": 1.1, **style})
    axes.set_xscale("log", base=2)
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, linewidth=0.3)


def plot(report: dict[str, Any], file: Path) -> None:
    """Draw all panels of a report into `file`; its suffix names the format."""
    found = panels(report["rows"])
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
    flat: Sequence[Any] = [axes for line in grid for axes in line]
    for axes, ((threads, n, k), rows) in zip(flat, found.items(), strict=False):
        draw(axes, f"N={n} K={k}, {threads} thread{'s' if threads > 1 else ''}", rows)
    for axes in flat[len(found) :]:
        axes.axis("off")
    for axes in flat[: len(found)][-columns:]:
        axes.set_xlabel("M (rows)", fontsize=8)
    for line in grid:
        line[0].set_ylabel("GFLOP/s", fontsize=8)
    handles, labels = flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.suptitle(f"{report['machine']['cpu']}, float32", y=0.0, fontsize=8)
    figure.tight_layout(rect=(0, 0.01, 1, 1 - 0.25 / size[1]))
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Draw the report named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("report", type=Path, help="JSON file of kernels.py")
    parser.add_argument("file", type=Path, help="e.g. docs/kernels.svg")
    options = parser.parse_args()
    report = msgspec.json.decode(options.report.read_bytes())
    if report.get("benchmark") != "kernels" or not report["rows"]:
        raise SystemExit(f"{options.report}: no report of benchmarks/kernels.py with rows")
    plot(report, options.file)


if __name__ == "__main__":
    main()
