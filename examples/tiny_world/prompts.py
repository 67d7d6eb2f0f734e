"""The prompts the small Llama was taught, as plain text: fields go in, a prompt comes out.

A reply ends with the token <|end|>; documents and relevant sentences are lines with a dash.
"""

from __future__ import annotations

from collections.abc import Iterable

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
