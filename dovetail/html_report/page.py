"""Writes the report of an artifact: one HTML file that needs no network and runs no script from it.

In: an `Inspection`, a recorded timeline. Out: the file. Its only script draws the timeline; the
policy in it names that script and the style by their hashes.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.console import RenderableType
from rich.table import Table

from dovetail import __version__
from dovetail.cli.inspect_summary import summarise
from dovetail.cli.inspection import Inspection, Section, memory_rows, read_sections
from dovetail.cli.report import facts_table, make_table, show_bytes, writing
from dovetail.errors import SpecError
from dovetail.html_report.charts import Axis, Series, draw_bar, draw_lines
from dovetail.html_report.pictures import Picture, plan_pictures, workflow_pictures
from dovetail.html_report.products import (
    ProductCurve,
    best_so_far,
    history_table,
    product_curves,
    read_records,
)
from dovetail.html_report.what_if import Situation, plan_variants, read_trace
from dovetail.ir.files import write_whole
from dovetail.ir.tuning import TuningRecord
from dovetail.topology.parameters import planned_parameters

WEB = files("dovetail.html_report") / "web"
TIMELINE = files("dovetail.runtime.server") / "web/timeline.js"
FOLDED = 12
"""Rows of a table above which it is folded away."""
Progress = Callable[[str, int, int], None]
"""Called with what is done, how many parts of it, and of how many."""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the page: notes above, charts and pictures, then tables."""

    name: str
    title: str
    notes: Sequence[str] = ()
    charts: Sequence[tuple[str, Markup]] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[RenderableType] = ()
    timeline: bool = False


def write_report(found: Inspection, output: Path, trace: Any, progress: Progress) -> None:
    """Write the report, with a timeline if there is one; SpecError where it cannot be written."""
    text = make_report(found, trace, progress)
    with writing(output):
        write_whole(output, text.encode())


def read_timeline(path: Path) -> Any:
    """Return a recorded timeline; SpecError where `path` is no Chrome trace."""
    try:
        trace = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read as a timeline: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise SpecError(f"{path} is no timeline; record one with `dovetail serve --timeline FILE`")
    return trace


def make_report(found: Inspection, trace: Any, progress: Progress) -> str:
    """Return the page."""
    parts = list(_parts(found, progress))
    script = ""
    if trace is not None:
        parts.insert(1, PageSection("timeline", "Timeline", timeline=True))
        script = TIMELINE.read_text() + (WEB / "report.js").read_text()
    style = (WEB / "report.css").read_text()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["rows"] = _rows
    template = environment.from_string((WEB / "report.html.j2").read_text())
    return template.render(
        name=Path(found.path).resolve().name,
        version=__version__,
        created=found.manifest.created,
        parts=parts,
        folded=FOLDED,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script) if script else "'none'",
        trace=None if trace is None else _embed(trace),
    )


def _parts(found: Inspection, progress: Progress) -> Iterator[PageSection]:
    records = read_records(Path(found.path), found.manifest.files)
    yield PageSection("summary", "Summary", tables=[facts_table("", summarise(found))])
    for section in read_sections(found):
        yield _illustrate(section, found)
        if section.name == "plans":
            yield from _what_if(found, progress)
        if section.name == "schedules":
            yield from _products(found, records)
            yield from _history(records)


def _illustrate(section: Section, found: Inspection) -> PageSection:
    """Return a section with the pictures that it has."""
    charts, pictures = [], list[Picture]()
    if section.name == "plans":
        pictures = list(plan_pictures(found))
    if section.name == "workflows":
        pictures = [picture for file in found.workflows for picture in workflow_pictures(file)]
    if section.name == "memory":
        rows = [(name, size, show_bytes(size)) for name, size, _ in memory_rows(found)]
        charts = [("memory on the CPU", Markup(draw_bar("memory on the CPU", rows)))]
    return PageSection(
        section.name, section.title, charts=charts, pictures=pictures, tables=section.parts
    )


def _what_if(found: Inspection, progress: Progress) -> Iterator[PageSection]:
    if found.hardware is None or not found.models:
        return
    file = found.models[0].file
    figures = planned_parameters(found.hardware, found.choice)
    now = Situation(found.hardware, figures, read_trace(found, file.max_step_sequences))
    variants = list(plan_variants(file.spec, now, progress))
    base = variants[0].seconds or 1.0
    rows = [(v.name, *v.shapes, f"{v.seconds:.4f}", f"{v.seconds / base:.2f}x") for v in variants]
    columns = ("if", "prefill", "decode", ">s per request", ">of now")
    title = f"best plans, processes x threads, for trace {now.trace.source}"
    notes = [
        "Simulated, not measured: the plans that the contention model finds best, with the figures "
        "that this artifact was planned with. Served may be others: fewer cores are preferred only "
        "where that was measured."
    ]
    tables = [make_table(title, columns, rows)]
    yield PageSection("what-if", "What if", notes=notes, tables=tables)


def _products(found: Inspection, records: Sequence[TuningRecord]) -> Iterator[PageSection]:
    figures = None if found.hardware is None else planned_parameters(found.hardware, found.choice)
    curves = product_curves(found, records, figures)
    if not curves:
        return
    notes = [
        "GFLOP/s of each product of the served plan over its rows M. The limit is the roofline of "
        "the plan's figures: threads times a core's rate in a large product by default schedules, "
        "and weights read from memory once. Weights that stay in caches, and tuned schedules, may "
        "exceed it."
    ]
    if figures is not None:
        core, memory = figures.core_flops, figures.package_bandwidth
        notes.append(
            f"Core: {core.value / 1e9:.0f} GFLOP/s ({core.source}); "
            f"memory: {memory.value / 1e9:.1f} GB/s ({memory.source})."
        )
    charts = [(curve.title, _draw_product(curve)) for curve in curves]
    tables = list(map(_product_table, curves))
    yield PageSection("products", "Products", notes=notes, charts=charts, tables=tables)


def _draw_product(curve: ProductCurve) -> Markup:
    points = curve.points
    lines = [
        Series("chosen", [(p.m, curve.rate(p.m, p.chosen)) for p in points], 0),
        Series("default", [(p.m, curve.rate(p.m, p.default)) for p in points if p.default], 1),
        Series("limit", [(p.m, curve.rate(p.m, p.limit)) for p in points if p.limit], 2, False),
    ]
    drawn = [line for line in lines if line.points]
    axes = Axis("rows M", logarithmic=True), Axis("GFLOP/s", logarithmic=True)
    return Markup(draw_lines(curve.title, *axes, drawn))


def _product_table(curve: ProductCurve) -> Table:
    rows = [
        (
            str(p.m),
            f"{curve.rate(p.m, p.chosen):.1f}",
            f"{curve.rate(p.m, p.default):.1f}" if p.default else "",
            f"{curve.rate(p.m, p.limit):.1f}" if p.limit else "",
            f"{p.default / p.chosen:.2f}x" if p.default else "",
        )
        for p in curve.points
    ]
    columns = (">M", ">chosen", ">default", ">limit", ">default time / chosen")
    return make_table(f"{curve.title}, GFLOP/s", columns, rows)


def _history(records: Sequence[TuningRecord]) -> Iterator[PageSection]:
    if not records:
        return
    title = "mean over products and M of default time / best time so far"
    axes = Axis("seconds spent on trials"), Axis("default time / best time", least=1.0)
    chart = draw_lines(title, *axes, [Series("best so far", best_so_far(records), marked=False)])
    yield PageSection(
        "tuning", "Tuning", charts=[(title, Markup(chart))], tables=[history_table(records)]
    )


def _rows(table: Table) -> list[tuple[RenderableType, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embed(trace: Any) -> Markup:
    """Return JSON that no text in it can end early."""
    return Markup(msgspec.json.encode(trace).decode().replace("<", "\\u003c"))
