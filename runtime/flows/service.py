"""What an app has of workflows: those it knows by name, indexes, and the driver that runs them.

In: workflows, indexes, inputs. Out: jobs. Threads and the worker's process start with the first
index or job, so an app that runs no workflow has none of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeAlias, get_type_hints

import msgspec

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import SpecError, WorkflowError
from dovetail.ir.graph import EMBEDDING
from dovetail.ir.index_file import DOCUMENTS, OFFSETS, EmbedderEntry
from dovetail.ir.options import check_fields, check_types
from dovetail.ir.place import find_searches
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Generation, Node, Retrieval, Workflow
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.engine.tally import Histogram
from dovetail.runtime.flows import gpu_memory
from dovetail.runtime.flows.control.costs import StageCosts
from dovetail.runtime.flows.control.front import Statistics
from dovetail.runtime.flows.control.messages import Device
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import check_transformations
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.costs import UNKNOWN_SCAN, UNKNOWN_STEP, measure_scan, measure_step
from dovetail.runtime.flows.driver import Driver, Executors
from dovetail.runtime.flows.generations import prepare_generation
from dovetail.runtime.flows.indexes import (
    AppIndex,
    BoundIndex,
    CutText,
    EmbedTexts,
    Indexes,
    embed_checked,
)
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.prompts import check_inputs
from dovetail.runtime.flows.recorder import FlowRecorder
from dovetail.runtime.flows.reranks import StartRerank
from dovetail.runtime.flows.stored_workflows import (
    check_workflow,
    models_by_kind,
    open_workflow,
)
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.hosting.generator import Generator
from dovetail.runtime.index.cursor import choose_probes
from dovetail.runtime.index.documents import open_documents
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.machine.seat import Board
from dovetail.runtime.machine.trust import check_trust
from dovetail.runtime.native.encoder import Rows
from dovetail.runtime.retrieval.hot import HotSets, HotStatistics
from dovetail.runtime.retrieval.memory_plan import GpuMemoryPlan
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import ADVICE, Opened
from dovetail.runtime.timeline import Timeline
from dovetail.topology.cgroup import read_limits

log = logging.getLogger("dovetail")

AnyWorkflow: TypeAlias = str | RAGraph | Workflow


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """How an app runs workflows.

    wavefront: how the control plane schedules. threads: of a search in the retrieval worker; None:
    as the artifact says. cluster_bytes: memory for hot clusters of indexes on the GPU that the app
    is loaded with, beside its KV; share: have `load` take both from what the KV pool was to have,
    as serves such workflows best. max_waiting: refuse runs while so many requests wait; None: runs
    wait themselves.
    """

    wavefront: WavefrontSettings = field(default_factory=WavefrontSettings)
    threads: int | None = None
    cluster_bytes: int = 0
    share: gpu_memory.GpuShare | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        """Raises SpecError for what is of a wrong type, too small, or an unknown transformation."""
        check_fields(self)
        check_transformations(self.wavefront.transformations or ())
        for name, least in (("threads", 1), ("cluster_bytes", 0), ("max_waiting", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SpecError(f"{name} must be at least {least}, not {value}")

    def plan_searches(self, artifact: Artifact) -> PhasePlan:
        """Return the threads and CPUs of searches, of those that this process may use now."""
        planned, allowed = find_searches(artifact.serve), os.sched_getaffinity(0)
        cpus = tuple(cpu for cpu in planned.cpus if cpu in allowed)
        if len(cpus) < len(planned.cpus):
            log.warning("the plan gives searches CPUs that this process may not use")
        most = len(cpus or allowed)
        most = min(most, max(1, int(read_limits(Path("/")).cpu_quota or most)))
        return PhasePlan(threads=self.threads or min(planned.threads, most), cpus=cpus)

    def share_gpu(
        self, artifact: Artifact, options: EngineOptions
    ) -> tuple[FlowSettings, GpuMemoryPlan | None, EngineOptions]:
        """Return settings and options with their parts of a GPU's memory, and how it is divided.

        Without a share or a GPU nothing changes. Raises as `name_index`, `ask_device` and
        `divide_memory`.
        """
        if self.share is None or not artifact.models or not options.beside_cpu:
            return self, None, options
        if options.gpu_blocks is not None:
            raise SpecError("give gpu_blocks or a share of the GPU's memory, not both")
        share = gpu_memory.name_index(self.share, artifact)
        device = gpu_memory.ask_device(artifact, options)
        found = gpu_memory.divide_memory(share, device, self.plan_searches(artifact).threads)
        plan = found.plan
        log.info("memory of the GPU (%s): %s", found.origin, gpu_memory.describe(plan))
        options = replace(options, gpu_blocks=plan.kv_bytes // device.block_bytes)
        return replace(self, cluster_bytes=plan.cluster_bytes), plan, options


class FlowService:
    """Workflows of one app. For any thread. worker: the process that searches."""

    def __init__(
        self,
        generator: Generator | None,
        embed: Callable[..., Rows],
        rerank: StartRerank,
        settings: FlowSettings,
        artifact: Artifact,
        gpu: str | None = None,
        *,
        cut: CutText | None = None,
        trust: bool = False,
        board: Board | None = None,
    ) -> None:
        """`embed` turns texts into vectors: of embedding nodes, and queries by default.

        It puts its keyword `prompt` before each text, and takes the encoder by `model`. `rerank`:
        of rerank nodes.

        `cut`: gives the parts of a text that it takes whole; None where nothing embeds.

        Workflows and indexes of `artifact` are opened when they are first needed. `gpu`: what may
        hold hot clusters. trust: indexes that are added, see `load`. board: of the workers.
        """
        self._settings, self._embed, self._cut, self._trust = settings, embed, cut, trust
        specs = {name: part.file.spec for name, part in artifact.encoders.items()}
        self._models = models_by_kind(artifact.models, specs)
        self._costs = StageCosts(scan=UNKNOWN_SCAN, overhead=0.0, step=UNKNOWN_STEP)
        self._vectors = 0  # of the index that they were measured on
        self._lock, self._opening = Lock(), Lock()
        self._unopened = dict(artifact.indexes)
        self._own = {path.resolve() for path in artifact.indexes.values()}
        self._stored = {stored.name: stored for stored in artifact.workflows}
        self._workflows: dict[str, Workflow] = {}
        # the last one of each name, as it was given and as it runs
        self._checked: dict[str, tuple[Workflow, Workflow]] = {}
        self._searching = settings.plan_searches(artifact)
        self.worker = RetrievalProcess(self._searching.threads, self._searching.cpus, board)
        self._open = Indexes()
        self._hot = HotSets(gpu, settings.cluster_bytes) if gpu else None
        by_model = {name: partial(embed, model=name) for name in (None, *self._models[EMBEDDING])}
        self._executors = Executors(
            generator, by_model, rerank, self.worker, self._open, self._hot, settings.max_waiting
        )
        self._driver = Driver(self._executors, self._make_control)

    @property
    def statistics(self) -> Statistics:
        """What came of guesses so far."""
        return self._driver.statistics

    @property
    def scans(self) -> Mapping[Device, Histogram]:
        """Seconds of retrieval sub-stages so far, by device."""
        return {device: tally.read() for device, tally in self._executors.scans.items()}

    @property
    def hot(self) -> Mapping[str, HotStatistics]:
        """What came of hot clusters so far, by the names of the indexes that have some."""
        return {} if self._hot is None else dict(self._hot.statistics)

    @property
    def workflows(self) -> dict[str, Workflow]:
        """All workflows by name; those of the artifact are opened, and so are its indexes."""
        self.open_indexes()
        return {name: self.find(name) for name in (*self._stored, *self._workflows)}

    def add_workflow(self, workflow: RAGraph | Workflow, *, whole: bool = False) -> None:
        """Have a workflow run by its name from now on; its indexes may be added later.

        whole: its indexes must be there, too. Raises WorkflowError where it is malformed, or a node
        lacks something else.
        """
        found = self.find(workflow)
        if whole:
            self.check(found)
        else:
            self._check(found, find_index=lambda _name: None)
        self._workflows[found.name] = found

    def find(self, workflow: AnyWorkflow) -> Workflow:
        """Return a workflow as a value, or by its name; WorkflowError where there is none."""
        if isinstance(workflow, Workflow):
            return workflow
        if isinstance(workflow, RAGraph):
            return workflow.workflow()
        if workflow not in self._workflows and workflow in self._stored:
            self._workflows[workflow] = open_workflow(self._stored[workflow])
        if workflow in self._workflows:
            return self._workflows[workflow]
        names = dict.fromkeys((*self._stored, *self._workflows))
        none = "none; add one by `dovetail compile --workflow`, or by app.add_workflow(...)"
        known = ", ".join(map(repr, names)) or none
        raise WorkflowError(f"there is no workflow {workflow!r}; there are: {known}")

    def add_index(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        nprobe: int | None = None,
        embed: EmbedTexts | None = None,
    ) -> None:
        """Open an index in the worker and measure it; see `App.add_index`."""
        check_types({"path": path, "name": name}, get_type_hints(FlowService.add_index), SpecError)
        if nprobe is not None and not (isinstance(nprobe, int) and nprobe > 0):
            raise SpecError(f"nprobe must be a whole number of at least 1, not {nprobe!r}")
        folder = Path(path).resolve()
        called = folder.name if name is None else name
        manifest = read_manifest(folder)
        if folder not in self._own and manifest.targets:
            check_trust(folder, trust=self._trust)
        if embed is None and self._cut is None:
            raise SpecError(f"there is no encoder for queries of index {called!r}; {ADVICE}")
        made = manifest.embedder or EmbedderEntry(name="", fingerprint="")
        asked = partial(self._embed, prompt=made.query_prompt)
        added: EmbedTexts | None = partial(self._embed, prompt=made.passage_prompt)
        if embed:  # of queries, whose prompt it may put before them
            asked = partial(embed_checked, embed)
            added = asked if made.query_prompt == made.passage_prompt else None
        documents = open_documents(folder / DOCUMENTS, folder / OFFSETS)
        texts = [documents[0].embedded] if len(documents) else []
        first = (added or asked)(texts)[0].tobytes() if texts else b""
        room = self._hot.room(called) if self._hot is not None else None
        cut, bound = None if embed else self._cut, Event()

        def bind(opened: Opened) -> None:
            probed = min(nprobe or choose_probes(len(opened.sizes)), len(opened.sizes))
            index = BoundIndex(called, opened, documents, probed, asked, added, cut, manifest.early)
            self._open.add(index)
            if self._hot is not None:
                self._hot.add(called, index.bytes if room and opened.hot else None)
            bound.set()

        def exchange(opened: Opened) -> None:
            self._driver.exchange(called, partial(bind, opened))

        with self._open.hold(called):
            opened = self.worker.open(
                called,
                folder,
                manifest=manifest,
                room=room,
                first=first,
                same=embed is None,
                opened=exchange,
            )
            bound.wait()
        if opened.why_cold:
            log.warning("index %r has no hot clusters on the GPU: %s", called, opened.why_cold)
        self._unopened.pop(called, None)
        self._checked.clear()  # another index may be meant now
        with self._lock:  # what the largest index costs is what the control plane begins with
            if (vectors := sum(opened.sizes)) >= self._vectors:
                threads = self._searching.threads
                scan, overhead = measure_scan(self.worker, called, opened, threads)
                self._costs = replace(self._costs, scan=scan, overhead=overhead, device=opened.hot)
                self._vectors = vectors

    def open_indexes(self) -> None:
        """Open the artifact's own indexes, if that has not been done; raises as `add_index`."""
        with self._opening:
            for name, path in tuple(self._unopened.items()):
                self.add_index(path, name=name)

    def index(self, name: str | None) -> AppIndex:
        """Return an index by its name; see `App.index`."""
        return AppIndex(self._find_index(name).name, self._open, self.worker)

    def check(self, workflow: Workflow) -> Workflow:
        """Return a workflow as it runs: its searches name their indexes, its nodes are ready.

        So runs go on where another index is added. Raises a WorkflowError that names the first node
        which cannot run.
        """
        known = self._checked.get(workflow.name)
        if known is None or not any(each is workflow for each in known):
            self._check(workflow, find_index=self._find_index, prepare=self._prepare)
            nodes = {name: self._bind(node) for name, node in workflow.nodes.items()}
            known = self._checked[workflow.name] = workflow, replace(workflow, nodes=nodes)
        return known[1]

    def _check(self, workflow: Workflow, **having: Any) -> None:
        generator = self._executors.generator
        adapters = generator.adapters if generator else None
        check_workflow(workflow, self._models, adapters=adapters, **having)

    def _bind(self, node: Node) -> Node:
        if not isinstance(node, Retrieval):
            return node
        return msgspec.structs.replace(node, index=self._find_index(node.index).name)

    def _prepare(self, node: Generation) -> None:
        if (generator := self._executors.generator) is not None:
            prepare_generation(generator, node)

    def submit(
        self, workflow: AnyWorkflow, inputs: Mapping[str, object], *, events: bool
    ) -> WorkflowJob:
        """Start a workflow; see `App.submit_workflow`."""
        if not isinstance(inputs, Mapping):
            raise WorkflowError('inputs are given by name, such as {"input": "..."}')
        found = self.check(self.find(workflow))
        if (generator := self._executors.generator) is not None:
            check_inputs(found, inputs, generator.context)
        return self._driver.submit(WorkflowRun(found, inputs), events=events)

    def start_recording(self, timeline: Timeline) -> None:
        """Draw what is done from now on."""
        self._executors.recorder = FlowRecorder(timeline, timeline.clock() - time.perf_counter())

    def stop_recording(self) -> None:
        """Draw no longer."""
        self._executors.recorder = None

    def close(self) -> None:
        """Fail what is under way; end the thread, then the worker. Safe to call twice."""
        self._driver.close()
        self.worker.close()

    def _make_control(self) -> Wavefront:
        """Return a control plane that knows what stages cost. On the driver's thread."""
        generator = self._executors.generator
        step = UNKNOWN_STEP if generator is None else measure_step(generator)
        with self._lock:
            costs = replace(self._costs, step=step)
            if self._hot is not None:
                self._hot.renew()
        return Wavefront(self._settings.wavefront, costs, self._open, self._hot)

    def _find_index(self, name: str | None) -> BoundIndex:
        self.open_indexes()
        return self._open.find(name)
