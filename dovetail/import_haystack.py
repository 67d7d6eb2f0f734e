"""A Haystack pipeline as a RAGraph, and our generation and retrieval as Haystack components.

In: a `haystack.Pipeline` (extra `haystack`). Out: a RAGraph, or a WorkflowError that names the
component at fault. Components of Haystack itself (prompt builders, rankers ...) become functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from threading import Lock
from typing import Any, Unpack

from dovetail.bound import Bound
from dovetail.ir.errors import WorkflowError, install
from dovetail.ir.options import SamplingOptions
from dovetail.ir.ragraph import RAGraph, make_generation
from dovetail.ir.workflow import END, START, Generation, Retrieval, State
from dovetail.runtime.flows.services import Services
from dovetail.runtime.index.documents import Document

try:
    import haystack
    from haystack.core.component import Component, InputSocket
except ImportError as error:
    raise ImportError(f"from_haystack needs haystack: {install('haystack')}") from error


@haystack.component
class DovetailGenerator:
    """A prompt in, the reply of the language model out."""

    def __init__(
        self,
        services: Services | None = None,
        *,
        model: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        """Options: as for `RAGraph.add_generation`; services only to run in Haystack itself."""
        haystack.component.set_output_types(self, reply=str)
        self.services, self.model, self.options = services, model, options

    def run(self, prompt: str) -> dict[str, Any]:
        """Return the reply."""
        node = self.node("reply", "{prompt}", "reply")
        return Bound(node, self.services)({"prompt": prompt})

    def node(self, name: str, prompt: str, output: str) -> Generation:
        """Return the node of a workflow that does the same."""
        return make_generation(name, prompt, output, self.model, self.options)


@haystack.component
class DovetailRetriever:
    """A query in, the nearest documents of an index out."""

    def __init__(
        self,
        services: Services | None = None,
        *,
        topk: int = 5,
        filters: Mapping[str, object] | None = None,
        index: str | None = None,
    ) -> None:
        """As for `RAGraph.add_retrieval`; services only to run in Haystack itself."""
        haystack.component.set_output_types(self, documents=list[haystack.Document])
        self.services, self.topk, self.index = services, topk, index
        self.filters = dict(filters or {})

    def run(self, query: str) -> dict[str, Any]:
        """Return documents of Haystack: content, score, and title and metadata as `meta`."""
        node = self.node("documents", "query", "documents")
        found = Bound(node, self.services)({"query": query})
        return {"documents": _convert(found["documents"])}

    def node(self, name: str, query: str, output: str) -> Retrieval:
        """Return the node of a workflow that does the same."""
        return Retrieval(name, query, output, self.topk, self.filters, self.index)


def from_haystack(pipeline: haystack.Pipeline, name: str = "haystack") -> RAGraph:
    """Return the workflow of a pipeline.

    Its inputs are the sockets that must be given and that nothing is connected to, by their names;
    others of these names get them, too (as in `pipeline.run({"query": ...})`). What a component
    gives at a socket is called `component_socket` here, in the result too.

    Raises:
        WorkflowError: a component takes any number of connections, or the pipeline goes round; the
            sentence names the component.
    """
    graph = pipeline.graph
    inputs = {
        socket.name
        for component in graph
        for socket in graph.nodes[component]["input_sockets"].values()
        if not socket.senders and socket.is_mandatory
    }
    # Haystack's order of a prompt's variables is another one in each process
    made = RAGraph(name, inputs=sorted(inputs))
    for component in graph:
        for fault in _faults(graph, component):
            raise WorkflowError(f"workflow {name!r}: node {component!r} {fault}")
        _add(made, graph, component)
        _connect(made, graph, component)
    made.workflow()
    return made


def _faults(graph: Any, component: str) -> Iterator[str]:
    for socket in graph.nodes[component]["input_sockets"].values():
        if socket.senders and socket.is_variadic:
            yield (
                f"takes any number of connections at {socket.name!r}; routes that join again are "
                "not imported"
            )
    for _, _, edge in graph.in_edges(component, data=True):
        if edge.get("conversion_strategy"):
            yield f"has {edge['to_socket'].name!r} converted on the way; connect equal types"


def _add(made: RAGraph, graph: Any, component: str) -> None:
    """Add the node of a component, and one more for each socket of it that is used."""
    instance, reads = graph.nodes[component]["instance"], _reads(graph, component, made.inputs)
    match instance:
        case DovetailGenerator():
            prompt, output = f"{{{reads['prompt']}}}", _name(component, "reply")
            made.add_node(instance.node(component, prompt, output))
        case DovetailRetriever():
            made.add_node(instance.node(component, reads["query"], _name(component, "documents")))
        case _:
            made.add_function(component, _calling(instance, reads), _name(component))
            for socket in _sockets(graph, component):
                pick = _picking(component, socket)
                made.add_function(f"{component}.{socket}", pick, _name(component, socket))


def _connect(made: RAGraph, graph: Any, component: str) -> None:
    """Add the edges into a component, those to its sockets, and to END where it is a last one."""
    sources = [
        _outlet(graph, source, edge["from_socket"].name)
        for source, _, edge in graph.in_edges(component, data=True)
    ]
    for source in dict.fromkeys(sources) or (START,):
        made.add_edge(source, component)
    outlets = dict.fromkeys(_outlet(graph, component, s) for s in _sockets(graph, component))
    for outlet in outlets:
        if outlet != component:
            made.add_edge(component, outlet)
        if not graph.out_degree(component):
            made.add_edge(outlet, END)
    if not outlets:
        made.add_edge(component, END)


def _sockets(graph: Any, component: str) -> tuple[str, ...]:
    """Return the sockets that something is connected to; all of a last component."""
    used = dict.fromkeys(
        edge["from_socket"].name for _, _, edge in graph.out_edges(component, data=True)
    )
    return tuple(used or graph.nodes[component]["output_sockets"])


def _outlet(graph: Any, component: str, socket: str) -> str:
    """Return the node that writes what a component gives at a socket."""
    ours = isinstance(graph.nodes[component]["instance"], DovetailGenerator | DovetailRetriever)
    return component if ours else f"{component}.{socket}"


def _reads(graph: Any, component: str, inputs: Collection[str]) -> dict[str, str]:
    """Return the name in the state of what each socket of a component gets."""
    found = {
        edge["to_socket"].name: _name(source, edge["from_socket"].name)
        for source, _, edge in graph.in_edges(component, data=True)
    }
    sockets: Mapping[str, InputSocket] = graph.nodes[component]["input_sockets"]
    given = {s.name: s.name for s in sockets.values() if not s.senders and s.name in inputs}
    return given | found


def _name(*parts: str) -> str:
    """Return a plain name for a component or one of its sockets."""
    return "_".join("".join(c if c.isalnum() else "_" for c in part) for part in parts)


def _calling(instance: Component, reads: Mapping[str, str]) -> Callable[[State], object]:
    """Return a call of a component, made ready before as Haystack does in every run."""
    run: Callable[..., object] = instance.run
    warm_up, lock = getattr(instance, "warm_up", lambda: None), Lock()

    def call(state: State) -> object:
        with lock:  # the first call may load a model, the others have nothing to do
            warm_up()
        return run(**{socket: _convert(state[name]) for socket, name in reads.items()})

    return call


def _picking(component: str, socket: str) -> Callable[[State], object]:
    def pick(state: State) -> object:
        given = state[_name(component)]
        if socket not in given:
            raise WorkflowError(
                f"component {component!r} gave no {socket!r} this time; conditional routes of "
                "Haystack pipelines are not supported"
            )
        return given[socket]

    return pick


def _convert(value: object) -> object:
    """Return documents of ours as Haystack's; all else as it is."""
    if not isinstance(value, list):
        return value
    return [_document(each) if isinstance(each, Document) else each for each in value]


def _document(found: Document) -> haystack.Document:
    meta = {"title": found.title, **found.metadata}
    return haystack.Document(id=str(found.id), content=found.text, meta=meta, score=found.score)
