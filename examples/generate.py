"""Compile a model once, then generate from it: one prompt streamed, then all of them in a batch.

    python examples/generate.py MODEL app.dove "Once upon a time" "The sea"

MODEL is a Hugging Face directory with a tokenizer.json; app.dove is compiled where it is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import dovetail


def main(model: str, artifact: str, *prompts: str) -> None:
    """Compile where needed, stream the first prompt, then answer all prompts together."""
    if not Path(artifact).exists():
        report = dovetail.compile(model, output=artifact, budget=10)  # seconds of measuring
        print(f"compiled {report.kernels} kernels for {', '.join(report.targets)}")
    with dovetail.load(artifact) as app:
        for chunk in app.stream(prompts[0], max_tokens=32):
            print(chunk.text, end="", flush=True)
        print()
        answers = app.generate(prompts, max_tokens=32, temperature=0.8, seed=1)
        for prompt, answer in zip(prompts, answers, strict=True):
            print(f"{prompt!r}: {len(answer.token_ids)} tokens, {answer.finish_reason}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
