"""The prompts the small Llama was taught, as plain text: fields go in, a prompt comes out.

A reply ends with the token <|end|>; documents and relevant sentences are lines with a dash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

END, USER, ASSISTANT, PAD = "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"
NONE = "None."
"""Reply where there is no next question, or no relevant sentence."""

ANSWER = "Documents:\n{docs}\nQuestion: {question}\nAnswer:"
COMPRESS = "Documents:\n{docs}\nQuestion: {question}\nRelevant:"
REFINE = "Documents:\n{docs}\nQuestion: {question}\nDraft: {draft}\nRefined:"
CLOSED_BOOK = "Question: {question}\nAnswer:"
NEXT_QUESTION = "Question: {question}\nKnown:\n{known}\nNext question:"
HYPOTHETICAL = "Question: {question}\nPassage:"
NOTHING = "- nothing"
"""What stands for `known` before the first step."""
MAX_TOKENS = 96
"""Longer than any reply the model was taught."""


def bullets(texts: Iterable[str]) -> str:
    """Return texts as lines that start with a dash, as the prompts show documents."""
    return "\n".join(f"- {text}" for text in texts) or NOTHING


# ---- tools, as the chat template shows them ----


def offer(tools: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Return the turn that lists tools: the name of each, and its parameters."""
    lines = (f"\n- {name}({', '.join(parameters)})" for name, parameters in tools)
    return f"{USER}Tools:{''.join(lines)}{END}"


def call(name: str, arguments: Mapping[str, object]) -> str:
    """Return how the model calls a tool; several calls stand on lines of their own."""
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


def result(text: str) -> str:
    """Return the turn that shows what a tool has answered."""
    return f"{USER}Result:\n{text}{END}"
