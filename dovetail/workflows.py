"""The five workflows of HedraRAG §6.1 as functions that return a RAGraph.

In: prompts, numbers of documents and of rounds. Out: a graph with the input `input` and the output
`answer`, to be run as it is or built on. None has code in it, so that files can hold them. With
`chat` each prompt is a message of the user, which the model's chat template makes a text of: models
trained to chat then end where the answer ends. Without it the model continues a plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Unpack

from dovetail.ir.options import SamplingOptions
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Branch, Collect, Join, Place, PromptMessage

ANSWER = "Documents:\n{docs}\nQuestion: {input}\nAnswer:"
NEXT_QUESTION = "Question: {input}\nKnown:\n{known}\nNext question:"
STEP_ANSWER = "Documents:\n{docs}\nQuestion: {step}\nAnswer:"
CONCLUDE = "Documents:\n{known}\nQuestion: {input}\nAnswer:"
HYPOTHESIS = "Question: {input}\nPassage:"
COMPRESS = "Documents:\n{docs}\nQuestion: {input}\nRelevant:"
REFINE = "Documents:\n{docs}\nQuestion: {input}\nDraft: {draft}\nRefined:"


def one_shot(
    *,
    topk: int = 5,
    answer: str = ANSWER,
    chat: bool = False,
    **options: Unpack[SamplingOptions],
) -> RAGraph:
    """Retrieve once, answer once. `options`: sampling parameters of every generation.

    chat: whether prompts are messages; say True for a model that was trained to chat.
    """
    graph = RAGraph("one-shot")
    graph.add_retrieval("search", query="input", output="docs", topk=topk)
    graph.add_generation("answer", prompt=_ask(answer, chat), output="answer", **options)
    _chain(graph, "search", "answer")
    return graph


def hyde(
    *,
    topk: int = 5,
    hypothesis: str = HYPOTHESIS,
    answer: str = ANSWER,
    chat: bool = False,
    **options: Unpack[SamplingOptions],
) -> RAGraph:
    """Write a passage that could hold the answer, search with it, answer (HyDE)."""
    graph = RAGraph("hyde")
    graph.add_generation("imagine", prompt=_ask(hypothesis, chat), output="passage", **options)
    graph.add_retrieval("search", query="passage", output="docs", topk=topk)
    graph.add_generation("answer", prompt=_ask(answer, chat), output="answer", **options)
    _chain(graph, "imagine", "search", "answer")
    return graph


def recomp(
    *,
    topk: int = 5,
    compress: str = COMPRESS,
    answer: str = ANSWER.replace("{docs}", "{relevant}"),
    chat: bool = False,
    **options: Unpack[SamplingOptions],
) -> RAGraph:
    """Retrieve, keep the sentences that matter, answer from these (RECOMP)."""
    graph = RAGraph("recomp")
    graph.add_retrieval("search", query="input", output="docs", topk=topk)
    graph.add_generation("compress", prompt=_ask(compress, chat), output="relevant", **options)
    graph.add_generation("answer", prompt=_ask(answer, chat), output="answer", **options)
    _chain(graph, "search", "compress", "answer")
    return graph


def irg(
    *,
    topk: int = 5,
    rounds: int = 3,
    answer: str = ANSWER,
    refine: str = REFINE,
    chat: bool = False,
    **options: Unpack[SamplingOptions],
) -> RAGraph:
    """Answer; then search with question and answer, and refine, `rounds` searches in all (IRG)."""
    graph = RAGraph("irg")
    names: list[str] = []
    for i in range(rounds):
        docs, reply = f"docs_{i}", f"draft_{i}" if i + 1 < rounds else "answer"
        draft = f"draft_{i - 1}"
        if i:
            graph.add_function(f"query {i}", Join(("input", draft)), f"query_{i}")
        graph.add_retrieval(
            f"search {i}", query=f"query_{i}" if i else "input", output=docs, topk=topk
        )
        prompt = (refine if i else answer).replace("{docs}", f"{{{docs}}}")
        prompt = prompt.replace("{draft}", f"{{{draft}}}")
        graph.add_generation(f"read {i}", prompt=_ask(prompt, chat), output=reply, **options)
        names += [f"query {i}"] * bool(i) + [f"search {i}", f"read {i}"]
    _chain(graph, *names)
    return graph


def multistep(
    *,
    topk: int = 5,
    rounds: int = 4,
    step: str = NEXT_QUESTION,
    step_answer: str = STEP_ANSWER,
    conclude: str = CONCLUDE,
    ends: Sequence[str] = ("", "none"),
    chat: bool = False,
    **options: Unpack[SamplingOptions],
) -> RAGraph:
    """Ask for the next sub-question and answer it until there is none; answer from the replies.

    ends: replies that are no sub-question any more; case and a full stop do not count.
    """
    graph = RAGraph("multistep", max_steps=rounds + 1)
    graph.add_function("recall", Collect("reply", "known"), "known")
    graph.add_generation("next", prompt=_ask(step, chat), output="step", **options)
    graph.add_retrieval("search", query="step", output="docs", topk=topk)
    graph.add_generation("read", prompt=_ask(step_answer, chat), output="reply", **options)
    graph.add_generation("answer", prompt=_ask(conclude, chat), output="answer", **options)
    graph.add_edge(START, "recall")
    graph.add_edge("recall", "next")
    more = Branch("step", "search", "answer", tuple(ends), {"known": rounds})
    graph.add_edge("next", more, ["search", "answer"])
    graph.add_edge("search", "read")
    graph.add_edge("read", "recall")
    graph.add_edge("answer", END)
    return graph


def _ask(prompt: str, chat: bool) -> str | list[PromptMessage]:
    """Return a prompt as the model is to be asked: as a message, or as a text to continue."""
    return [PromptMessage("user", prompt)] if chat else prompt


def _chain(graph: RAGraph, *names: str) -> None:
    """Join nodes in a row, from START to END."""
    places: tuple[Place, ...] = (START, *names, END)
    for source, target in pairwise(places):
        graph.add_edge(source, target)


BUNDLED: dict[str, Callable[..., RAGraph]] = {
    "one-shot": one_shot,
    "hyde": hyde,
    "recomp": recomp,
    "irg": irg,
    "multistep": multistep,
}
