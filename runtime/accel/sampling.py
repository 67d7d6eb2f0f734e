"""Chooses tokens on the device, as the CPU's kernel does (`codegen/kernels/sample.dk`).

In: logits and sampling parameters of a step's rows. Out: ids and their log probabilities in the
step's arrays. Rows whose logits the host changes are chosen there anew.
"""

from __future__ import annotations

import torch

from dovetail.runtime.accel.step import Step, moment_bytes

LEAST_SHARE = 1e-9
"""What `top_p` keeps at least, as the CPU's kernel has it."""
MOST_SCALE = 1e30
DRAWN_BYTES = 64
"""What drawing from a logit takes: weights, their order and sums in float64."""


def choose_tokens(step: Step, rows: int, vocabulary: int) -> None:
    """Write `out_ids` and `out_logprobs` of the first rows."""
    arrays, host = step.arrays, step.host
    logits = arrays["logits"][:rows, :vocabulary]
    chosen = logits.argmax(-1)
    drawn = host["temperature"][:rows] > 0
    if drawn.any():
        at = torch.from_numpy(drawn).to(logits.device).nonzero()[:, 0]
        narrow = bool((host["top_k"][:rows][drawn] > 0).any())
        narrow |= bool((host["top_p"][:rows][drawn] < 1.0).any())
        given = {n: arrays[n][:rows].index_select(0, at) for n in _PARAMETERS}
        most = max(1, moment_bytes(logits.device) // (DRAWN_BYTES * vocabulary))
        for first in range(0, len(at), most):
            rows_now = slice(first, first + most)
            some = {name: values[rows_now] for name, values in given.items()}
            found = draw_tokens(logits.index_select(0, at[rows_now]), narrow=narrow, **some)
            chosen.index_copy_(0, at[rows_now], found)
    arrays["out_ids"][:rows].copy_(chosen)
    scores = logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(-1)
    arrays["out_logprobs"][:rows].copy_(scores)


def draw_tokens(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    narrow: bool,
) -> torch.Tensor:
    """Return a token for each row of `logits` [n][vocab], drawn by its number in [0, 1).

    narrow: whether any row has a top_k (0 = off) or top_p (1 = off), which need an order.
    """
    scale = (1.0 / temperature).clamp(max=MOST_SCALE)[:, None]
    weights = ((logits - logits.max(-1, keepdim=True).values) * scale).exp()
    bound = min_p.clone()
    if narrow:
        ordered = weights.sort(-1, descending=True).values
        last = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1]) - 1
        kth = ordered.gather(1, last[:, None].long())
        ordered = ordered.where(ordered >= kth, 0.0)  # equals of the last one stay
        sums = ordered.double().cumsum(-1)
        need = top_p.clamp(min=LEAST_SHARE)[:, None] * sums[:, -1:]
        least = ordered.gather(1, (sums < need).sum(-1, keepdim=True).clamp(max=last.max()))
        bound = torch.maximum(
            bound, torch.where(top_p < 1.0, torch.maximum(kth, least)[:, 0], kth[:, 0])
        )
    kept = weights.where(weights >= bound[:, None], 0.0).double().cumsum(-1)
    passed = kept > uniform[:, None] * kept[:, -1:]
    return passed.to(torch.uint8).argmax(-1)


_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "uniform")
