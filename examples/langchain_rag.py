"""Retrieval and an answer by LangChain, over a Dovetail server: its chat and embedding models.

    dovetail serve MODEL ENCODER
    python examples/langchain_rag.py http://127.0.0.1:8000/v1 MODEL ENCODER "Who founded Komosburg?"

MODEL and ENCODER are the names that the server prints. Needs `pip install langchain-openai`.
"""

from __future__ import annotations

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

DOCUMENTS = (
    "The founder of Komosburg is Copa Grorsky.",
    "Trorikmere is the capital of Mivurmark.",
    "Melkar is the capital of Zorvia. Its people speak Zorvish.",
)
ANSWER = ChatPromptTemplate.from_template("Documents:\n- {docs}\nQuestion: {input}\nAnswer:")
KEY = "unused"
"""For servers without `--api-key`."""


def main(url: str, model: str, encoder: str, question: str) -> None:
    """Find the nearest document, and stream an answer from it."""
    vectors = OpenAIEmbeddings(
        base_url=url,
        api_key=KEY,
        model=encoder,
        check_embedding_ctx_length=False,  # the server cuts texts, by its own tokenizer
    )
    store = InMemoryVectorStore.from_texts(DOCUMENTS, vectors)
    (found,) = store.similarity_search(question, k=1)
    chain = ANSWER | ChatOpenAI(base_url=url, api_key=KEY, model=model, temperature=0)
    for chunk in chain.stream({"docs": found.page_content, "input": question}):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
