"""What tests with the official client share: a prompt, its offline answer, refusals."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from dovetail.runtime.app import App

PROMPT = (
    "Documents:\n- Melkar is the capital of Zorvia.\n"
    "Question: What is the capital of Zorvia?\nAnswer:"
)
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12}


def chat_ids(offline: App) -> list[int]:
    assert offline.tokenizer is not None
    return offline.tokenizer.encode(f"<|user|>{PROMPT}<|end|><|assistant|>", special=False)


def answer(offline: App, prompt: str | list[int], **options: Any) -> str:
    (found,) = offline.generate([prompt], **options)
    assert found.text is not None
    return found.text


def refused(call: Any, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        call(**fields)
    body = caught.value.body
    assert isinstance(body, dict) and set(body) == {"message", "type", "param", "code"}
    return caught.value
