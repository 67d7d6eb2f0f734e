"""Autotuning jobs on a Ray cluster: one job for each model, all trials in one database.

    ray start --head
    python examples/tune_on_ray.py ADDRESS tuning.jsonl SECONDS MODEL...

SECONDS are those of a job. Trials run on the nodes of the cluster that are machines like this one;
where there are none, the error says how such a node is started. An interrupted job continues when
the command is given again. Needs `pip install -e '.[ray,tune]'`.
"""

from __future__ import annotations

import sys

import dovetail


def main(address: str, database: str, seconds: str, *models: str) -> None:
    """Tune the models one after the other; `dovetail compile --db` uses what was found."""
    for model in models:
        report = dovetail.tune(model, database=database, ray=address, budget=float(seconds))
        print(f"{model}: {report.trials} trials, {report.measured} of them now, ", end="")
        print(f"by {report.workers} workers in {report.seconds:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
