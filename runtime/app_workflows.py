"""What an app has of workflows: those it knows, indexes that they search, and runs.

In: graphs, index folders, inputs. Out: results and jobs, for threads and for asyncio.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Workflow
from dovetail.runtime.flows.changes import AppIndex
from dovetail.runtime.flows.events import WorkflowResult
from dovetail.runtime.flows.indexes import EmbedTexts
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.service import AnyWorkflow, FlowService


class WorkflowCalls:
    """The part of an `App` that runs workflows."""

    _flows: FlowService

    @property
    def flows(self) -> FlowService:
        """What runs workflows; for its figures."""
        return self._flows

    @property
    def workflows(self) -> Mapping[str, Workflow]:
        """The workflows that `run` knows by name: those of the artifact, and those added.

        Those of the artifact are opened, with its indexes; raises as `run` and `add_index`.
        """
        return self._flows.workflows

    def find_workflow(self, name: str) -> Workflow:
        """Return a workflow that `run` knows; WorkflowError where there is none, or it is wrong."""
        return self._flows.find(name)

    def add_workflow(self, workflow: RAGraph | Workflow) -> None:
        """Have `run` know a workflow by its name; WorkflowError where it is malformed."""
        self._flows.add_workflow(workflow)

    def add_index(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        nprobe: int | None = None,
        embed: EmbedTexts | None = None,
    ) -> None:
        """Have workflows search the index folder at `path`, in a process of its own.

        Indexes of the artifact are known without this, and opened by the first workflow.

        Args:
            path: what `dovetail index build` wrote.
            name: what retrieval nodes call it, the folder's name by default. Nodes that name no
                index search the only one there is.
            nprobe: clusters that a search scans, nearest first: more find more, in more time. All
                of them are an exact search. Default an eighth, and no less than 16.
            embed: turns queries into vectors; by default the app's encoder does, with the prompt
                for queries that the index was built with.

        Raises:
            ArtifactError: there is no index at `path`, or it is damaged.
            SpecError: nprobe is below 1, or faiss is not installed (extra `rag`).
            DeviceError: the process cannot be started.
        """
        self._flows.add_index(path, name=name, nprobe=nprobe, embed=embed)

    def index(self, name: str | None = None) -> AppIndex:
        """Return an index of the app by its name, to add and remove documents; None: the only one.

        Raises WorkflowError where there is none, or several may be meant, and as `add_index`.
        """
        return self._flows.index(name)

    def run(self, workflow: AnyWorkflow, inputs: Mapping[str, object]) -> WorkflowResult:
        """Run a workflow and return what it came to.

        Args:
            workflow: a graph, or the name of one of the artifact, or that was added.
            inputs: the values of its inputs by name.

        Raises:
            WorkflowError: workflow or inputs are wrong; nothing was started. Or a node failed; the
                error names it, and other workflows go on.
            RequestError: the app was closed meanwhile.
        """
        job = self._flows.submit(workflow, inputs, events=False)
        try:
            return job.result()
        finally:
            job.cancel()

    async def arun(self, workflow: AnyWorkflow, inputs: Mapping[str, object]) -> WorkflowResult:
        """As `run`, in an event loop. A task that is cancelled ends its workflow."""
        job = self._flows.submit(workflow, inputs, events=False)
        try:
            return await job
        finally:
            job.cancel()

    def submit_workflow(self, workflow: AnyWorkflow, inputs: Mapping[str, object]) -> WorkflowJob:
        """Start a workflow, as `run`; return it at once.

        The job's `result()` waits for the end, and `cancel()` ends it. Iterating over it gives
        events: nodes that start and finish, text as it is written, sub-stages of searches. `await`
        and `async for` do the same in an event loop.
        """
        return self._flows.submit(workflow, inputs, events=True)
