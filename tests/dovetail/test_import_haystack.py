"""Pipelines of Haystack itself: run there, imported and run here, with the same outcome."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
haystack = pytest.importorskip("haystack")

from haystack.components.builders import PromptBuilder  # noqa: E402
from haystack.components.joiners import DocumentJoiner  # noqa: E402
from haystack.components.rankers import LostInTheMiddleRanker  # noqa: E402

from dovetail.import_haystack import (  # noqa: E402
    DovetailGenerator,
    DovetailRetriever,
    from_haystack,
)
from dovetail.ir.errors import WorkflowError  # noqa: E402
from dovetail.ir.ragraph import RAGraph  # noqa: E402
from dovetail.runtime.flows.services import perform  # noqa: E402
from dovetail.runtime.flows.workflow_run import run_in_order  # noqa: E402
from tests.dovetail.echo import Echo  # noqa: E402
from tests.processes import printed_with_seeds  # noqa: E402

ECHO = Echo()
TEMPLATE = "{% for d in documents %}{{ d.meta.title }}: {{ d.content }};{% endfor %} {{ query }}"


def pipeline(*edges: str, **components: Any) -> Any:
    made = haystack.Pipeline()
    for name, component in components.items():
        made.add_component(name, component)
    for edge in edges:
        made.connect(*edge.split(">"))
    return made


def builder(*required: str) -> Any:
    return PromptBuilder(TEMPLATE, required_variables=list(required or ("query", "documents")))


def test_a_misspelt_option_of_a_generator_is_told_of() -> None:
    wrong = DovetailGenerator(ECHO, temprature=1.0)
    with pytest.raises(WorkflowError, match="temprature"):
        from_haystack(pipeline(say=wrong))
    with pytest.raises(WorkflowError, match="temprature"):
        wrong.run(prompt="Hello")


def one_shot(*required: str) -> Any:
    return pipeline(
        "find.documents>prompt.documents",
        "prompt.prompt>say.prompt",
        find=DovetailRetriever(ECHO, topk=2),
        prompt=builder(*required),
        say=DovetailGenerator(ECHO, max_tokens=9),
    )


def optional_question() -> Any:
    """The question is optional in the prompt, which gets it beside the search all the same."""
    return one_shot("documents")


def hyde() -> Any:
    """Imagine, search with that, rank, answer; the question goes to two prompts."""
    return pipeline(
        "first.prompt>imagine.prompt",
        "imagine.reply>find.query",
        "find.documents>rank.documents",
        "rank.documents>prompt.documents",
        "prompt.prompt>say.prompt",
        first=PromptBuilder("Passage on {{ query }}", required_variables=["query"]),
        imagine=DovetailGenerator(ECHO),
        find=DovetailRetriever(ECHO, topk=5),
        rank=LostInTheMiddleRanker(),
        prompt=builder(),
        say=DovetailGenerator(ECHO),
    )


def run(graph: RAGraph, text: str) -> dict[str, Any]:
    return run_in_order(graph.workflow(), {"query": text}, lambda call: perform(call, ECHO))


@pytest.mark.parametrize("build", [one_shot, optional_question, hyde])
def test_an_imported_pipeline_gives_what_haystack_gives(build: Any) -> None:
    native = build().run({"query": "What is it?"})
    assert run(from_haystack(build()), "What is it?")["say_reply"] == native["say"]["reply"]


def test_a_component_is_made_ready_before_it_runs() -> None:
    """As Haystack's rankers, which load their models then."""

    @haystack.component
    class Loud:
        model: Any = None

        def warm_up(self) -> None:
            self.model = str.upper

        @haystack.component.output_types(text=str)
        def run(self, text: str) -> dict[str, str]:
            return {"text": self.model(text)}

    graph = from_haystack(pipeline("say.reply>loud.text", say=DovetailGenerator(ECHO), loud=Loud()))
    found = run_in_order(graph.workflow(), {"prompt": "a"}, lambda call: perform(call, ECHO))
    assert found["loud_text"] == found["say_reply"].upper() != found["say_reply"]


PROMPT = """
from haystack import Pipeline
from haystack.components.builders import PromptBuilder
from dovetail.import_haystack import from_haystack

pipeline = Pipeline()
template = "{{ a }} {{ b }} {{ c }} {{ d }} {{ e }} {{ f }}"
pipeline.add_component("prompt", PromptBuilder(template, required_variables="*"))
print(from_haystack(pipeline).workflow().inputs)
"""


def test_inputs_do_not_depend_on_the_order_of_a_set() -> None:
    """Which is another in each process; an artifact's are compared with the file's at each load."""
    assert printed_with_seeds(PROMPT) == {b"('a', 'b', 'c', 'd', 'e', 'f')\n"}


def test_settings_of_components_come_along() -> None:
    workflow = from_haystack(one_shot(), "shot").workflow()
    assert (workflow.name, workflow.inputs) == ("shot", ("query",))
    assert list(workflow.nodes) == ["find", "prompt", "prompt.prompt", "say"]
    find, say = workflow.nodes["find"], workflow.nodes["say"]
    assert find.topk == 2 and dict(say.options) == {"max_tokens": 9}  # type: ignore[union-attr]


def test_every_socket_of_a_last_component_is_in_the_result() -> None:
    @haystack.component
    class Split:
        @haystack.component.output_types(head=str, tail=str)
        def run(self, text: str) -> dict[str, str]:
            return {"head": text[:1], "tail": text[1:]}

    graph = from_haystack(
        pipeline("say.reply>split.text", say=DovetailGenerator(ECHO), split=Split())
    )
    inputs = {"prompt": "abc"}
    found = run_in_order(graph.workflow(), inputs, lambda call: perform(call, ECHO))
    assert (found["split_head"], found["split_tail"]) == ("<", "abc>")


def test_a_socket_that_stays_empty_is_named() -> None:
    @haystack.component
    class Sometimes:
        @haystack.component.output_types(prompt=str)
        def run(self, query: str) -> dict[str, str]:
            return {}

    graph = from_haystack(
        pipeline("maybe.prompt>say.prompt", maybe=Sometimes(), say=DovetailGenerator(ECHO))
    )
    with pytest.raises(WorkflowError, match="component 'maybe' gave no 'prompt'"):
        run(graph, "?")


def test_what_cannot_be_imported_is_named() -> None:
    joined = pipeline(
        "a.documents>join.documents",
        "b.documents>join.documents",
        a=DovetailRetriever(ECHO),
        b=DovetailRetriever(ECHO),
        join=DocumentJoiner(),
    )
    with pytest.raises(WorkflowError, match="node 'join' takes any number of connections"):
        from_haystack(joined)
    turning = pipeline(
        "a.reply>b.prompt",
        "b.reply>a.prompt",
        a=DovetailGenerator(ECHO),
        b=DovetailGenerator(ECHO),
    )
    with pytest.raises(WorkflowError, match="START"):
        from_haystack(turning)


def test_a_component_without_services_says_so_when_haystack_runs_it() -> None:
    alone = pipeline(say=DovetailGenerator())
    with pytest.raises(Exception, match="node 'reply' calls a model or an index"):
        alone.run({"prompt": "?"})
