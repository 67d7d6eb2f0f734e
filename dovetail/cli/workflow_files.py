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
CHAT = "-chat"
"""Ends the name of one of the five that asks in messages, through the model's chat template."""


def is_bundled(text: str) -> bool:
    """Tell whether a text names one of the five, asked in texts or in messages."""
    return text.removesuffix(CHAT) in BUNDLED


def find_workflow(text: str) -> RAGraph | Path:
    """Return the graph of one of the five, or the path of a file.

    Raises SpecError where there is neither.
    """
    if is_bundled(text):
        name = text.removesuffix(CHAT)
        graph = BUNDLED[name](max_tokens=ANSWER_TOKENS, chat=text != name)
        graph.name = text  # an artifact and a server may have both
        return graph
    if not Path(text).is_file():
        raise SpecError(
            f"{text!r} is neither a file nor a workflow; choose one of {', '.join(BUNDLED)}, "
            f"each with {CHAT} behind it for a model trained to chat"
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
