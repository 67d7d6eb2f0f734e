"""Chat, RAG and embeddings at once on one machine: who shares out the CPU, and what comes of it.

SLOs, before anything was measured: a chat answer has its first token within 1 s and each further one
within 0.1 s on average (as fast as one reads); a RAG answer is there within 4 s; a call that embeds
8 texts is back within 0.5 s. Goodput: requests per second that keep theirs, at the best of RATES.
"""

from __future__ import annotations

FIRST_TOKEN, EACH_TOKEN = 1.0, 0.1
RAG_ANSWER = 4.0
EMBEDDED = 0.5
"""The SLOs, in seconds."""
REQUESTS = {"chat": 1.0, "rag": 0.5, "embed": 2.0}
"""Arrivals a second, a Poisson process each, at rate 1."""
RATES = (1.0, 2.0, 4.0)
