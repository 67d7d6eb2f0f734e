"""The classifier's row that rows of a head make: what is answered to yes, less what is to no.

In: a decoder's checkpoint and tokens. Out: the same with `score.weight`, as transformers calls the
classifier of a decoder; and whether that head is the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.compiler.files.checkpoint import Checkpoint, TensorInfo
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import SpecError

SCORE = "score.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_score(checkpoint: Checkpoint, answers: tuple[int, ...]) -> Checkpoint:
    """Return the tensors with the row that makes a score: of the first answer minus the second.

    One that is stored stays.
    """
    if SCORE in checkpoint.tensors:
        return checkpoint
    name = HEAD if HEAD in checkpoint.tensors else EMBEDDING
    head = checkpoint.info(name)
    if max(answers) >= head.height:
        raise SpecError(f"{head.path}: tensor {name} has no row {max(answers)} for an answer")
    dtype = DTYPES["f32"]
    row = TensorInfo(
        *(SCORE, head.path, dtype, (1, *head.shape[1:]), 0, 0, dtype.safetensors),
        packed=_Difference(checkpoint, name, answers),
    )
    return replace(checkpoint, tensors={**checkpoint.tensors, SCORE: row})


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Tell whether a head is stored that is not the embedding: transformers takes it, then."""
    if not {HEAD, EMBEDDING} <= checkpoint.tensors.keys():
        return False
    height, step = checkpoint.info(HEAD).height, 1024
    return height != checkpoint.info(EMBEDDING).height or any(
        not np.array_equal(checkpoint.rows(HEAD, *rows), checkpoint.rows(EMBEDDING, *rows))
        for rows in ((first, min(first + step, height)) for first in range(0, height, step))
    )


@dataclass(frozen=True, slots=True)
class _Difference:
    """The one row; what is quantised is widened first."""

    checkpoint: Checkpoint
    head: str
    answers: tuple[int, ...]

    def values(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return it, or none of it."""
        rows = (self.checkpoint.rows(self.head, i, i + 1) for i in self.answers)
        yes, *no = map(self.checkpoint.info(self.head).dtype.widen, rows)
        found: npt.NDArray[np.float32] = yes - sum(no)
        return found[first:last]
