"""Workflows of an artifact: a template of data, and the Python file that made it where it has code.

In: the template, and the file beside it. Out: the workflow. The file is code of the artifact, as
its kernels are: it is listed with its sha256 and runs where the artifact is loaded.
"""

from __future__ import annotations

import hashlib
import sys
from types import ModuleType

from dovetail.ir.errors import ArtifactError, WorkflowError, describe_error
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.template import raise_file
from dovetail.ir.workflow import Workflow
from dovetail.ir.workflow_file import make_graph
from dovetail.runtime.artifact import StoredWorkflow


def run_file(source: bytes, path: str) -> dict[str, Workflow]:
    """Run a Python file and return the workflows of all graphs that its names stand for.

    Raises WorkflowError where it cannot be run, or a graph is wrong.
    """
    name = "dovetail_workflow_" + hashlib.sha256(source).hexdigest()[:16]
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where dataclasses look up the types of their fields
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise WorkflowError(
            f"{path} cannot be run ({describe_error(error)}); a workflow's file may need installed "
            "packages and nothing else"
        ) from error
    graphs = {id(value): value for value in vars(module).values() if isinstance(value, RAGraph)}
    found: dict[str, Workflow] = {}
    for graph in graphs.values():
        if graph.name in found:
            raise WorkflowError(f"{path} has two graphs called {graph.name!r}")
        found[graph.name] = graph.workflow()
    return found


def open_workflow(stored: StoredWorkflow) -> Workflow:
    """Return a workflow of an artifact; its file runs here, where it has one.

    Raises WorkflowError where the file cannot be run, ArtifactError where it makes something else
    than it did for the compile.
    """
    if stored.source is None:
        return make_graph(raise_file(stored.template)).workflow()
    found = run_file(stored.source.read_bytes(), str(stored.source)).get(stored.name)
    if found is None or found.template != stored.template:
        raise ArtifactError(
            f"{stored.source} makes another workflow {stored.name!r} than when it was compiled; "
            "compile the artifact again"
        )
    return found
