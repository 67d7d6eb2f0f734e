"""Workflows as verbs are given them: one of the five by its name, or a file of graphs.

In: what stood behind `--workflow`. Out: what a compile takes, or the workflows themselves.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.errors import SpecError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Workflow
from dovetail.ir.workflow_file import read_workflow
from dovetail.workflows import BUNDLED

ANSWER_TOKENS = 64
"""Tokens of a reply in the five workflows at most."""


def find_workflow(text: str) -> RAGraph | Path:
    """Return the graph of one of the five, or the path of a file.

    Raises SpecError where there is neither.
    """
    if text in BUNDLED:
        return BUNDLED[text](max_tokens=ANSWER_TOKENS)
    if not Path(text).is_file():
        raise SpecError(
            f"{text!r} is neither a file nor a workflow; choose one of {', '.join(BUNDLED)}"
        )
    return Path(text)


def read_graphs(text: str) -> list[Workflow]:
    """Return one of the five workflows, or those of a JSON, YAML or Python file.

    Raises as `find_workflow`, and WorkflowError where the file holds none.
    """
    found = find_workflow(text)
    if isinstance(found, RAGraph):
        return [found.workflow()]
    if found.suffix != ".py":
        return [read_workflow(found.read_bytes()).workflow()]
    from dovetail.runtime.flows.stored_workflows import run_file

    return list(run_file(found.read_bytes(), str(found)).values())
