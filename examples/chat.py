"""Chat with a model, line by line: answers stream, and earlier turns are remembered.

    python examples/chat.py MODEL

MODEL is an artifact, a Hugging Face directory, a GGUF file, or a name at the Hugging Face hub.
"""

from __future__ import annotations

import sys
from typing import Any

import dovetail


def main(model: str) -> None:
    """Answer each line of the input, until it ends."""
    messages: list[dict[str, Any]] = []
    with dovetail.load(model) as app:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            answer = ""
            for delta in app.chat_stream(messages, max_tokens=256):
                answer += delta.content
                print(delta.content, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
