"""The small encoder on torch: texts go in, unit vectors come out.

Training measures with it; whoever only embeds compiles the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from transformers import BertModel
from transformers.utils import logging

from dovetail.tiny_world import ENCODER

BATCH = 64


class Encoder:
    """Embeds texts: mean of the last hidden states, unit length."""

    def __init__(self, folder: Path = ENCODER) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_padding()
        logging.disable_progress_bar()  # it loads in milliseconds
        self._model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return float32 [len(texts), d]."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = np.empty((len(texts), self._model.config.hidden_size), np.float32)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            out[rows] = self._embed_batch([texts[i] for i in rows])
        return out

    def _embed_batch(self, texts: list[str]) -> npt.NDArray[np.float32]:
        encoded = self._tokenizer.encode_batch(texts)
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        with torch.inference_mode():
            hidden = self._model(ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        found: npt.NDArray[np.float32] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return found
