"""Workflows and indexes that become part of an artifact.

In: graphs, files of graphs, index folders. Out: templates `graph/<name>.json`, with the Python file
that made them where they have code, and `indexes/<name>/`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dovetail.compiler.files.config import read_bounded
from dovetail.compiler.request import GivenWorkflow, check_name
from dovetail.compiler.write.writer import ArtifactWriter
from dovetail.ir.errors import SpecError, WorkflowError
from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.index_file import IndexManifest
from dovetail.ir.options import check_types
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.template import find_functions, lower
from dovetail.ir.workflow import Workflow
from dovetail.ir.workflow_file import read_workflow
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.embed.open import open_encoders
from dovetail.runtime.flows.service import FlowService, FlowSettings
from dovetail.runtime.flows.stored_workflows import check_workflow, run_file
from dovetail.runtime.index.manifest import MANIFEST, check_file, read_manifest
from dovetail.runtime.machine.devices import CPU
from dovetail.topology.hardware import read_hardware

FILE_BYTES = 1 << 20
"""Most bytes of a workflow's file."""
SERVE = "serve"
"""The name in `graph/` that plans have."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A workflow to store: its template, and the Python file that makes it where it has code."""

    workflow: Workflow
    template: ExecutionGraph
    source: bytes | None = None


def read_workflows(
    given: Iterable[GivenWorkflow],
    models: Mapping[str, Collection[str]],
    adapters: Collection[str] | None,
) -> tuple[Stored, ...]:
    """Return the workflows of graphs and files; nodes may ask for `models` by their kind.

    adapters: those of the model that generates; None where none does.

    Raises SpecError for a file that cannot be read or names that clash, WorkflowError for a
    workflow that is wrong, that has code and came without its file, or cannot run with the models.
    """
    found: dict[str, Stored] = {}
    for item in given:
        check_types({"a workflow": item}, {"a workflow": GivenWorkflow}, SpecError)
        for stored in _read(item):
            name = stored.workflow.name
            check_name("a workflow in an artifact", name)
            if name in found or name == SERVE:
                raise SpecError(f"two workflows have the name {name!r}; rename one")
            found[name] = stored
    check_models(found.values(), models, adapters)
    return tuple(found.values())


def check_models(
    stored: Iterable[Stored],
    models: Mapping[str, Collection[str]],
    adapters: Collection[str] | None,
) -> None:
    """Raise WorkflowError for the first node that cannot run with these models, by kind."""
    for each in stored:
        check_workflow(each.workflow, models, adapters=adapters, find_index=lambda _name: None)


def read_indexes(folders: Iterable[Path]) -> dict[str, tuple[Path, IndexManifest]]:
    """Return folders and manifests by name, which is the folder's; ArtifactError for a bad one."""
    found: dict[str, tuple[Path, IndexManifest]] = {}
    for folder in (given.resolve() for given in folders):
        check_name("an index in an artifact", folder.name)
        if folder.name in found:
            raise SpecError(f"two indexes have the name {folder.name!r}; rename one folder")
        manifest = read_manifest(folder)
        for name in manifest.files:
            check_file(folder, manifest, name, contents=False)
        found[folder.name] = folder, manifest
    return found


def write_workflows(artifact: ArtifactWriter, workflows: Iterable[Stored]) -> None:
    """Write the templates, and the files of those that have code."""
    for stored in workflows:
        name = f"graph/{stored.workflow.name}"
        artifact.write_json(f"{name}.json", stored.template.file)
        if stored.source is not None:
            artifact.write_bytes(f"{name}.py", stored.source)


def write_indexes(artifact: ArtifactWriter, indexes: dict[str, tuple[Path, IndexManifest]]) -> None:
    """Put indexes into the artifact: files are shared with the folders where the disk can.

    As they are now: one may have been built anew since it was read, while schedules were searched.
    """
    for name, (folder, _) in indexes.items():
        data, manifest = read_bounded(folder / MANIFEST, FILE_BYTES), read_manifest(folder)
        artifact.write_bytes(f"indexes/{name}/{MANIFEST}", data)
        for file, entry in manifest.files.items():
            artifact.link(f"indexes/{name}/{file}", folder / file, entry)


def check_indexes(where: Path) -> None:
    """Raise SpecError, as an app does, where a sealed artifact's encoder has not made its indexes.

    It must run here. One without an encoder is let pass: callers may embed queries themselves.
    """
    machine = read_hardware()
    artifact = open_artifact(where, machine)
    if artifact.encoders:
        with closing(open_encoders(artifact, machine, device=CPU)) as found:
            embed = partial(found.embed, wait=True)
            rerank = found.start_rerank
            flows = FlowService(None, embed, rerank, FlowSettings(), artifact, cut=found.divide)
            with closing(flows):
                flows.open_indexes()


def _read(given: GivenWorkflow) -> list[Stored]:
    if isinstance(given, RAGraph | Workflow):
        return [_of_data(given.workflow() if isinstance(given, RAGraph) else given)]
    path = Path(given)
    if not path.is_file():
        raise SpecError(f"there is no workflow file {path}; give *.py, *.json or *.yaml")
    data = read_bounded(path, FILE_BYTES)
    if path.suffix != ".py":
        return [_of_data(read_workflow(data).workflow())]
    made = run_file(data, str(path))
    if not made:
        raise SpecError(f"{path} makes no RAGraph; assign one to a name of the file")
    return [
        Stored(workflow, lower(workflow, strict=True), data)
        if find_functions(workflow)
        else _of_data(workflow)
        for workflow in made.values()
    ]


def _of_data(workflow: Workflow) -> Stored:
    if code := find_functions(workflow):
        raise WorkflowError(
            f"workflow {workflow.name!r} calls {', '.join(code)}, and an artifact holds "
            "functions in files alone; make the graph in a Python file and give its path"
        )
    return Stored(workflow, lower(workflow, strict=True))
