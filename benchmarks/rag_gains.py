"""What the rows of the real RAG benchmark say: gains with intervals, tables, the time still needed.

In: rows. Out: values; pure. A gain is the ratio of two columns in the same cell and with the same
questions, paired by seed: the geometric mean over seeds, and the interval that holds the true one
with a probability of 0.95 (Student's t on logarithms), where there are several. `stack` is the best
of the stacks in each cell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rag_parts import BF16, DIFFERENT, Q4_0, ZIPF

Row: TypeAlias = Mapping[str, Any]
STACK, SERVED, PLAIN, FULL, FREE = "stack", "served", "plain", "full", "free"
RALMSPEC, RAGCACHE = "ralmspec", "ragcache"
WITHOUT = "no_"
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of 0.975 by degrees of freedom, 1 to 9; more than 9 are taken for 9."""
PLACE = ("part", "workflow", "questions", "weights", "topk", "count", "vectors", "nprobe")
"""What tells cells from each other, besides column and seed."""
FIGURES = {"latency": "mean", "bursts": "mean"}
"""What is compared, by part; else the rate."""
CLOSE = 0.9
"""Part of the best stack's rate from which another one may be the best with other questions."""


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as good. low, high: of the interval, None for one seed."""

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ({self.low:.2f}-{self.high:.2f})"


def average(ratios: Sequence[float]) -> Gain:
    """Return the gain that ratios of several seeds say."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) == 1:
        return Gain(math.exp(middle))
    t = T95[min(len(logs) - 1, len(T95)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Gain(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def figure(row: Row) -> float:
    """Return what a row is compared by, more is better."""
    name = FIGURES.get(row["part"], "rate")
    value = float(row[name])
    return 1 / value if name == "mean" else value


def place(row: Row) -> tuple[Any, ...]:
    """Return the cell of a row, whatever its column and seed."""
    return tuple(row.get(name) for name in PLACE)


def best_stack(rows: Iterable[Row]) -> Row | None:
    """Return the row of the best stack of rows in one cell, None where there is none."""
    stacks = [row for row in rows if row["column"].startswith(f"{STACK}:")]
    return max(stacks, key=figure, default=None)


def by_column(rows: Iterable[Row]) -> dict[str, Row]:
    """Return rows of one cell and seed by column; `stack` is the best one of them."""
    rows = list(rows)
    found = {row["column"]: row for row in rows}
    if (best := best_stack(rows)) is not None:
        found[STACK] = best
    return found


def gain(rows: Sequence[Row], better: str, worse: str, what: str = "") -> Gain | None:
    """Return the gain of a column over another one in a cell; None where no seed has both.

    what: the name of the first one's figure, where it is not that of its part.
    """
    ratios = []
    for seed in {row["seed"]: None for row in rows}:
        found = by_column(row for row in rows if row["seed"] == seed)
        if better in found and worse in found:
            mine = found[better][what] if what else figure(found[better])
            ratios.append(mine / figure(found[worse]))
    return average(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class Key:
    """A figure of the summary: the least gain over the cells that are meant.

    what: see `gain`. low: the lower ends of the intervals count.
    """

    name: str
    better: str
    worse: str
    where: Mapping[str, Any]
    what: str = ""
    low: bool = False


def _keys() -> list[Key]:
    online: dict[str, Any] = {"part": "rate", "weights": BF16, "topk": 5, "mixed": False}
    zipf, different = {**online, "questions": ZIPF}, {**online, "questions": DIFFERENT}
    late, turns = {**online, "part": "latency"}, {"part": "turns"}
    return [
        Key("rate_vs_stack_zipf", FULL, STACK, zipf),
        Key("rate_vs_stack", FULL, STACK, different),
        Key("latency_vs_stack", FULL, STACK, late),
        Key("kernels", SERVED, STACK, online),
        Key("orchestration", PLAIN, SERVED, online, low=True),
        Key("transformations_zipf", FULL, PLAIN, zipf),
        Key("transformations", FULL, PLAIN, different),
        Key("turns_vs_stack_zipf", FULL, STACK, zipf | turns),
        Key("turns_vs_stack", FULL, STACK, different | turns),
        Key("turns_q4_0_vs_stack", FULL, STACK, {**turns, "weights": Q4_0}),
        Key("turns_orchestration", PLAIN, SERVED, turns, low=True),
        Key("turns_transformations_zipf", FULL, PLAIN, zipf | turns),
        Key("turns_transformations", FULL, PLAIN, different | turns),
        Key("bound_of_free_searches", FREE, FULL, online),
        Key("bound_of_free_searches_and_prompts", FREE, FULL, online, what="again"),
        Key("q4_0_rate_vs_stack", FULL, STACK, {**online, "weights": Q4_0}),
        Key("top1_rate_vs_stack", FULL, STACK, {**online, "topk": 1}),
        Key("offline_rate_vs_stack", FULL, STACK, {**online, "part": "offline"}),
        Key("bursts_latency_vs_stack", FULL, STACK, {**online, "part": "bursts"}),
        Key("mixed_rate_vs_stack", FULL, STACK, {**online, "mixed": True}),
        Key("mixed_latency_vs_stack", FULL, STACK, {**late, "mixed": True}),
        *(
            Key(f"vectors_vs_{column}", FULL, column, {"part": "vectors"})
            for column in (SERVED, PLAIN, RALMSPEC, RAGCACHE)
        ),
    ]


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the least gain over cells for each key that has some, and what a cell says of it.

    Transformations by themselves: the geometric mean over all cells of full over `no_NAME`.
    """
    cells, found = _group(rows, place), dict[str, Any]()
    for key in _keys():
        gains = [
            one
            for cell in cells
            if _fits(cell[0], key.where) and (one := gain(cell, key.better, key.worse, key.what))
        ]
        if key.low:
            gains = [Gain(one.low or one.mean, one.low, one.high) for one in gains]
        if gains:
            least = min(gains, key=lambda one: one.mean)
            found[f"{key.name}_min"] = least.mean
            if least.low is not None:
                found[f"{key.name}_interval"] = [least.low, least.high]
    for column in sorted({r["column"] for r in rows if r["column"].startswith(WITHOUT)}):
        alone = [one.mean for cell in cells if (one := gain(cell, FULL, column)) is not None]
        if alone:
            found[f"gain_of_{column.removeprefix(WITHOUT)}"] = statistics.geometric_mean(alone)
    return found


def _fits(row: Row, where: Mapping[str, Any]) -> bool:
    told = {**row, "mixed": "+" in row["workflow"]}
    return all(told.get(name) == value for name, value in where.items())


def _group(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[list[Row]]:
    """Return rows in groups of one key, in the order in which they first occur."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line for each cell: means of the four columns, what each adds, rivals, the bound."""
    lines = []
    for cell in _group((row for row in rows if row["part"] != "vectors"), place):
        line: dict[str, Any] = {name: cell[0].get(name) for name in PLACE[:5]}
        seeds = [by_column(r for r in cell if r["seed"] == s) for s in {r["seed"] for r in cell}]
        name = FIGURES.get(cell[0]["part"], "rate")
        for column in (STACK, SERVED, PLAIN, FULL):
            if values := [float(found[column][name]) for found in seeds if column in found]:
                line[column] = statistics.fmean(values)
        bests = [found[STACK]["column"].partition(":")[2] for found in seeds if STACK in found]
        line["best"] = "/".join(dict.fromkeys(bests))
        for title, better, worse, what in (
            ("b/a", SERVED, STACK, ""),
            ("c/b", PLAIN, SERVED, ""),
            ("d/c", FULL, PLAIN, ""),
            ("d/a", FULL, STACK, ""),
            ("free/d", FREE, FULL, ""),
            ("free read/d", FREE, FULL, "again"),
        ):
            if (found := gain(cell, better, worse, what)) is not None:
                line[title] = str(found)
        lines.append(line)
    return lines


def ablate(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line for each cell: full over `no_NAME`, for each transformation."""
    lines = []
    for cell in _group(rows, place):
        names = dict.fromkeys(r["column"] for r in cell if r["column"].startswith(WITHOUT))
        gains = {name: str(found) for name in names if (found := gain(cell, FULL, name))}
        if gains:
            lines.append({name: cell[0][name] for name in PLACE[:3]} | gains)
    return lines


def divide_time(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return where the seconds of a request go in the best stack and in ours, by cell: a waterfall.

    wait: for the first token of each reply, which is the prompt and its queue; whole replies where
    a server does not tell. decode: the tokens after it. other: orchestration.
    """
    lines = []
    for cell in _group((row for row in rows if row["part"] == "latency"), place):
        seeds = [by_column(r for r in cell if r["seed"] == s) for s in {r["seed"] for r in cell}]
        for column in (STACK, FULL):
            own = [found[column] for found in seeds if column in found]
            if own:
                mean = {
                    name: statistics.fmean(float(row[name]) for row in own)
                    for name in ("search", "reply", "decode", "other", "mean")
                }
                reply, decode = mean.pop("reply"), mean["decode"]
                line: dict[str, Any] = {name: cell[0][name] for name in PLACE[1:5]}
                lines.append({**line, "column": column, "wait": reply - decode, **mean})
    return lines


def map_gains(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return by the ratio of search to generation time of a request alone what there is to gain."""
    lines = []
    for cell in _group((row for row in rows if row["part"] == "vectors"), place):
        plain = next((row for row in cell if row["column"] == PLAIN), None)
        if plain is None:
            continue
        line = {name: plain[name] for name in ("workflow", "vectors", "nprobe")}
        line["search_s"], line["reply_s"] = plain["alone_search"], plain["alone_reply"]
        line["ratio"] = plain["alone_search"] / plain["alone_reply"]
        for column in (SERVED, PLAIN, RALMSPEC, RAGCACHE):
            if (found := gain(cell, FULL, column)) is not None:
                line[f"full/{column}"] = str(found)
        lines.append(line)
    return sorted(lines, key=lambda line: float(line["ratio"]))


def stacks_to_measure(cell: Row, rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    """Return the peers that may be the best one in a cell.

    All, until rates of other seeds with the same workflow, questions and weights are known; then
    those that were CLOSE to the best.
    """
    same = ("workflow", "questions", "weights", "count")
    known = [
        row
        for row in rows
        if row["part"] == "rate"
        and row["seed"] != cell["seed"]
        and row["topk"] == cell["topk"]
        and all(row[name] == cell[name] for name in same)
        and row["column"].startswith(f"{STACK}:")
    ]
    best = max((figure(row) for row in known), default=0.0)
    close = {row["column"].partition(":")[2] for row in known if figure(row) >= CLOSE * best}
    return [peer for peer in peers if not close or peer in close]


def predict_seconds(left: Sequence[Row], rows: Sequence[Row], default: float) -> float:
    """Return what cells still take, by what those of the same workflow and column took so far."""
    return sum(_mean_wall(cell, rows, default) for cell in left)


def _mean_wall(cell: Row, rows: Sequence[Row], default: float) -> float:
    for same in (("workflow", "column"), ("workflow",), ()):
        if took := [row["wall"] for row in rows if all(row[n] == cell[n] for n in same)]:
            return statistics.fmean(took)
    return default
