"""Attention of packed texts on a torch device: each row sees the rows of its own text.

In: q, k and v rows of all texts of a pass, one behind another. Out: rows of attention. Texts of
alike length go together, padded to at most a quarter more; where torch has a kernel for texts of
any lengths (`torch.nn.attention.varlen`, NVIDIA), that takes them all at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from dovetail.runtime.accel.step import Step

FINE = 2
"""Widths of a group: so many bits behind the first one of a length tell them apart."""
MASK_VALUES = 1 << 24
"""Values of a mask at most: longer texts are attended a stretch of queries at a time."""
HALVES = (torch.bfloat16, torch.float16)
MOST_HEAD = 256
"""Values of a head at most in torch's kernel for texts of any lengths."""
AMPERE = (8, 0)

Varlen: TypeAlias = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """What the attention of one layer is: of `count` query heads of `size` values each.

    keys: heads of keys, each for as many query heads. bias [heads][2 x span]: at span + row - key
    what is added to a score, or None. reach: how far from a row a key may lie, 0 = any distance.
    causal: later keys are hidden.
    """

    count: int
    keys: int
    size: int
    scale: float
    reach: int
    causal: bool
    bias: torch.Tensor | None

    @property
    def columns(self) -> int:
        """Columns of q, k and v."""
        return (self.count + 2 * self.keys) * self.size

    def part(self, heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v of all heads, which are the second dimension."""
        found: tuple[torch.Tensor, ...] = torch.split(heads, (self.count, self.keys, self.keys), 1)
        return found


@dataclass(frozen=True, slots=True)
class _HeadGroup:
    """Texts of alike length. rows [n x width]: where each row of a padded text lies.

    Padding repeats a text's last row. own: places among those that are rows of texts, None where
    there is no padding; seen [n][1][1][width]: the same, as a mask of keys.
    """

    rows: torch.Tensor
    width: int
    own: torch.Tensor | None
    seen: torch.Tensor | None


def attend_groups(step: Step, qkv: torch.Tensor, out: torch.Tensor, heads: Heads) -> None:
    """Attend text by text. qkv [T][columns]: all heads of q, then of k, then of v."""
    if "texts" not in step.shared:
        step.shared["texts"] = _group_texts(step, qkv.device)
    for group in step.shared["texts"]:
        taken = qkv.index_select(0, group.rows)
        places = taken.view(-1, group.width, heads.columns // heads.size, heads.size)
        q, k, v = heads.part(places.transpose(1, 2))
        found = _attend(q, k, v, group, heads).transpose(1, 2).reshape(len(taken), -1)
        if group.own is None:
            out.index_copy_(0, group.rows, found)
        else:
            own = group.own
            out.index_copy_(0, group.rows.index_select(0, own), found.index_select(0, own))


def _group_texts(step: Step, device: torch.device) -> list[_HeadGroup]:
    starts = step.host["seq_starts"]
    lengths = np.diff(starts)
    shifts = np.maximum([int(n).bit_length() - 1 - FINE for n in lengths], 0)
    widths = ((lengths - 1 >> shifts) + 1) << shifts
    groups = []
    for kind in np.unique(widths).tolist():
        texts = np.flatnonzero(widths == kind)
        each, width = lengths[texts], int(lengths[texts].max())
        places = np.arange(width)
        rows = starts[texts][:, None] + np.minimum(places, each[:, None] - 1)
        own = places < each[:, None]
        padded = not own.all()
        groups.append(
            _HeadGroup(
                rows=torch.from_numpy(rows.reshape(-1).astype(np.int64)).to(device),
                width=width,
                own=torch.from_numpy(np.flatnonzero(own)).to(device) if padded else None,
                seen=torch.from_numpy(own[:, None, None]).to(device) if padded else None,
            )
        )
    return groups


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _HeadGroup, heads: Heads
) -> torch.Tensor:
    """Return [n][heads][width][size] for q, k and v alike."""
    if heads.keys < heads.count:
        k, v = (each.repeat_interleave(heads.count // heads.keys, 1) for each in (k, v))
    width, reach = group.width, heads.reach if heads.reach < group.width - 1 else 0
    if heads.bias is None and not reach:  # padding comes last: a causal row does not see it
        seen = None if heads.causal else group.seen
        how: dict[str, Any] = {"attn_mask": seen, "is_causal": heads.causal, "scale": heads.scale}
        return F.scaled_dot_product_attention(q, k, v, **how)
    each = len(q) * (heads.count if heads.bias is not None else 1) * width
    stretch = max(1, MASK_VALUES // each)
    found = torch.empty_like(q)
    for first in range(0, width, stretch):
        last = min(first + stretch, width)
        low, high = (max(0, first - reach), min(width, last + reach)) if reach else (0, width)
        found[:, :, first:last] = F.scaled_dot_product_attention(
            q[:, :, first:last],
            k[:, :, low:high],
            v[:, :, low:high],
            attn_mask=_weigh(group, heads, range(first, last), range(low, high), q.dtype),
            scale=heads.scale,
        )
    return found


def _weigh(
    group: _HeadGroup, heads: Heads, queries: range, keys: range, dtype: torch.dtype
) -> torch.Tensor:
    """Return which keys queries see, or what their distances add to scores: as SDPA takes it."""
    device = group.rows.device
    rows = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distances = rows - torch.arange(keys.start, keys.stop, device=device)
    mask = distances.abs() <= (heads.reach or group.width)
    if heads.causal:
        mask = mask & (distances >= 0)
    if group.seen is not None:
        mask = mask & group.seen[..., keys.start : keys.stop]
    if heads.bias is None:
        return mask
    added = heads.bias[:, distances + heads.bias.shape[1] // 2]
    return added.masked_fill(~mask, -torch.inf).to(dtype)


def find_varlen(device: torch.device, dtype: torch.dtype, heads: Heads) -> Varlen | None:
    """Return torch's kernel for texts of any lengths, where it takes such attention here.

    It is FlashAttention: of 16-bit values, a head of keys for each of queries, without biases, on
    NVIDIA's from Ampere on.
    """
    plain = heads.bias is None and heads.keys == heads.count
    fits = dtype in HALVES and plain and heads.size <= MOST_HEAD
    if device.type != "cuda" or torch.version.hip or not fits or heads.size % 8:
        return None
    if torch.cuda.get_device_capability(device) < AMPERE:
        return None
    try:
        from torch.nn.attention import varlen  # noqa: PLC0415 - torch 2.10 and newer
    except ImportError:
        return None
    found: Varlen | None = getattr(varlen, "varlen_attn", None)
    knows = found is not None and "window_size" in inspect.signature(found).parameters
    return found if knows else None  # the first version had no windows and no scale


def attend_varlen(
    step: Step, qkv: torch.Tensor, out: torch.Tensor, heads: Heads, varlen: Varlen
) -> None:
    """As `attend_groups`, by `varlen`."""
    starts, longest = step.arrays["seq_starts"], int(np.diff(step.host["seq_starts"]).max())
    q, k, v = heads.part(qkv.unflatten(1, (-1, heads.size)))
    reach = heads.reach or -1
    window = (reach, 0 if heads.causal else reach)
    more: dict[str, Any] = {"scale": heads.scale, "window_size": window}
    found = varlen(q, k, v, starts, starts, longest, longest, **more)
    out.copy_(found.reshape(len(qkv), -1))
