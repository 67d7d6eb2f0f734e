"""Answer questions from a folder of texts: index it once, then search and answer.

    python examples/rag_folder.py FOLDER MODEL ENCODER WORK "Who founded Komosburg?"

FOLDER has Markdown, text, JSON lines or CSV. WORK keeps the index and the compiled models: the
second question starts at once. Delete WORK/idx after the texts have changed. A model that has a
chat template is asked in messages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dovetail
from dovetail import workflows


def main(folder: str, model: str, encoder: str, work: str, question: str) -> None:
    """Build what is missing, then print the answer and the texts that it comes from."""
    index, artifact = Path(work) / "idx", Path(work) / "app.dove"
    if not index.exists():
        build = ["dovetail", "index", "build", folder, "-o", str(index), "--embedder", encoder]
        subprocess.run(build, check=True)
    if not artifact.exists():
        dovetail.compile({"llm": model, "embedder": encoder}, output=artifact, effort="none")
    with dovetail.load(artifact) as app:
        app.add_index(index)
        graph = workflows.one_shot(topk=1, max_tokens=64, chat=app.template is not None)
        result = app.run(graph, {"input": question})
    print(result.outputs["answer"].strip())
    for document in result.outputs["docs"]:
        print("from:", document.text)


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
