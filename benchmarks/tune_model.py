"""`dovetail tune` on a whole model from an empty database, killed half-way and resumed; compiles.

Run `python benchmarks/tune_model.py --json F`; `--resume` keeps the efforts that F has already. For
each effort a tuning job is killed after half its budget, goes on, and two compiles
follow: the first with the database, the second with all that the first has left in the cache too.
About 3 minutes for `fast`, 15 for `full`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import add_report_options, open_report
from dovetail.compiler.search.tables import EFFORTS
from generate_models import SHAPES, write_checkpoint

SEED = 7
POLL = 0.05
SHOWN = ("effort", "killed_seconds", "records_at_kill", "resumed_seconds", "tune_seconds")
SHOWN += ("trials", "measured_after_kill", "gain", "compile_seconds", "second_compile_seconds")
COMMAND = (sys.executable, "-P", "-c", "from dovetail.cli import main; main()")


def count_records(database: Path) -> int:
    """Return the lines of a database that may not be there yet."""
    return database.read_bytes().count(b"\n") if database.exists() else 0


def run(*words: object) -> tuple[float, dict[str, Any]]:
    """Run a verb of the command line; return seconds and its JSON. Stops where it fails."""
    start = time.perf_counter()
    command = [*COMMAND, *map(str, words), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return time.perf_counter() - start, found


def tune_and_kill(model: Path, database: Path, effort: str) -> tuple[float, bool]:
    """Tune, and kill the job half its budget after its first record.

    Returns its seconds, and whether it was killed before it ended by itself.
    """
    start = time.perf_counter()
    words = ("tune", model, "--db", database, "--effort", effort)
    job = subprocess.Popen([*COMMAND, *map(str, words)], stdout=subprocess.DEVNULL)
    while job.poll() is None and not count_records(database):
        time.sleep(POLL)
    try:
        job.wait(EFFORTS[effort].seconds / 2)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
        return time.perf_counter() - start, True
    return time.perf_counter() - start, False


def show(model: Path, work: Path, effort: str) -> dict[str, Any]:
    """Return the row of one effort."""
    database = work / f"{effort}.jsonl"
    database.unlink(missing_ok=True)
    before, killed = tune_and_kill(model, database, effort)
    records = count_records(database)
    print(f"{effort}: killed after {before:.1f} s with {records} records", flush=True)
    options = (model, "--db", database, "--effort", effort)
    after, tuned = run("tune", *options)
    print(f"{effort}: resumed for {after:.1f} s", flush=True)
    row = {
        "effort": effort,
        "killed": killed,
        "killed_seconds": before,
        "records_at_kill": records,
        "resumed_seconds": after,
        "tune_seconds": before + after,
        "trials": tuned["trials"],
        "measured_after_kill": tuned["measured"],
        "records": count_records(database),
        "gain": tuned["progress"]["gain"],
    }
    for name in ("compile", "second_compile"):
        seconds, report = run("compile", *options, "--output", work / f"{effort}-{name}.dove")
        print(f"{effort}: {name} {seconds:.1f} s", flush=True)
        row |= {
            f"{name}_seconds": seconds,
            f"{name}_steps": report["seconds"],
            f"{name}_measured": report["measured"],
        }
    return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures the issue names."""
    names = ("tune_seconds", "second_compile_seconds")
    return {f"{row['effort']}_{name}": row[name] for row in rows for name in names}


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_report_options(parser)
    parser.add_argument("--model", choices=SHAPES, default="160m")
    parser.add_argument("--efforts", default=",".join(EFFORTS), help="default all")
    options = parser.parse_args()
    options.efforts = options.efforts.split(",")
    if not set(options.efforts) <= set(EFFORTS):
        parser.error(f"--efforts takes {','.join(EFFORTS)}")
    return options


def main() -> None:
    """Tune with every effort asked for, print the table, write the report."""
    options = parse_options()
    config = {"model": options.model, "dtype": "f32"}
    report = open_report("tune_model", options, config, tuple(config))
    with tempfile.TemporaryDirectory(prefix="dovetail-tune-") as folder:
        work = Path(folder)
        model = work / options.model
        write_checkpoint(model, options.model, "f32", SEED)
        done = {row["effort"] for row in report.rows}
        for effort in options.efforts:
            if effort not in done:
                report.rows.append(show(model, work, effort))
                report.summary = summarize(report.rows)
                report.write(options.json)
    report.print(SHOWN)


if __name__ == "__main__":
    main()
