"""The tiny world: a synthetic corpus made from a seed, and small models trained on its like."""

from __future__ import annotations

from pathlib import Path

SEED = 2026
"""Seed of the bundled world."""
SHARES = {"train": 0.6, "dev": 0.15, "test": 0.25}
LLAMA = Path(__file__).parent / "models/llama"
"""Folder of the small Llama, in Hugging Face layout."""
ENCODER = Path(__file__).parent / "models/encoder"
"""Folder of the small BERT encoder, in sentence-transformers layout."""
