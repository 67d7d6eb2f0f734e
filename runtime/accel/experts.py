"""Mixtures of experts on a torch device: rows sorted by expert, one grouped product for all.

In: entries of a tape. Out: their work. What lies between entries is held beside the buffers, since
indices are no activations; no number of rows goes to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ir.errors import DeviceError
from dovetail.ir.tape import Entry, Tape, WeightRef
from dovetail.runtime.accel.step import Step
from dovetail.runtime.accel.tape import Bind, TorchTape, Work, integer, number

Weight = TypeVar("Weight")
Pair: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Makes one row of sums of gate and up."""


@dataclass(slots=True)
class _Routed:
    """Where the rows of a step went, while its layer is computed.

    weights [T][k]; order: choice (t, j) of each sorted row; experts: whose it is; ends: int32, the
    rows before the end of each expert's; rows: sorted, as the last product left them.
    """

    weights: Tensor
    order: Tensor
    experts: Tensor
    ends: Tensor
    rows: Tensor


def without_experts(tape: Tape, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the weights but those of experts: what serves one matrix alone has no use for them."""
    grouped = {entry.slots[5] for entry in tape.entries if entry.groups}
    return {name: w for name, w in weights.items() if WeightRef(name=name) not in grouped}


def _held(tape: TorchTape) -> list[_Routed]:
    """Return the one place where the layers of a tape leave what they chose."""
    found: list[_Routed] = tape.share("experts", lambda: (lambda _: None, []))
    return found


def bind_route(tape: TorchTape, entry: Entry) -> Work:
    """Choose k of E experts for each row, sort the rows by expert."""
    _, experts, used, parts, kept, choice, sigmoid, share, scale, factors, logits, *_ = entry.slots
    count, k, shared, times = integer(experts), integer(used), integer(share), number(scale)
    added, own = tape.weight(choice), tape.weight(factors)
    scores, held = tape.rows(logits, count, entry.m), _held(tape)
    groups, tops = (integer(parts), integer(kept)), 2 if integer(sigmoid) else 1
    weigh = torch.sigmoid if integer(sigmoid) else partial(torch.softmax, dim=-1)

    def run(step: Step) -> None:
        given = scores(step).float()
        every = weigh(given)
        by = _of_groups(given if added is None else every + added, *groups, tops)
        chosen = by.topk(k, -1).indices
        weights = every.gather(-1, chosen)
        if shared:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        weights = weights * times
        if own is not None:
            weights = weights * own[chosen]
        flat = chosen.flatten()
        each = (flat[:, None] == torch.arange(count, device=flat.device)).sum(0)
        ends = each.cumsum(0, dtype=torch.int32)
        order = flat.argsort(stable=True)
        held[:] = [_Routed(weights, order, flat[order], ends, scores(step))]

    return run


def _of_groups(scores: Tensor, groups: int, used: int, tops: int) -> Tensor:
    """Return the scores, those of all but the best groups -inf, which their `tops` best rank."""
    if groups == 1:
        return scores
    parts = scores.view(len(scores), groups, -1)
    best = parts.topk(tops, -1).values.sum(-1).topk(used, -1).indices
    dropped = torch.ones(parts.shape[:2], dtype=torch.bool, device=scores.device)
    dropped.scatter_(1, best, False)
    return parts.masked_fill(dropped[..., None], -torch.inf).view_as(scores)


def bind_rows_of_experts(tape: TorchTape, entry: Entry) -> Work:
    """Gather the row of each choice, sorted by expert."""
    _, k, hidden, _, x, *_ = entry.slots
    source, held, each = tape.rows(x, integer(hidden), entry.m), _held(tape), integer(k)

    def run(step: Step) -> None:
        (routed,) = held
        routed.rows = source(step).index_select(0, routed.order // each)

    return run


def bind_experts(tape: TorchTape, entry: Entry, end: Pair | None) -> Work:
    """Multiply each row by its expert's weight; end: of a gated product, what acts on both sums."""
    held = _held(tape)
    assert entry.groups is not None
    if not hasattr(F, "grouped_mm"):
        raise DeviceError(
            f"torch {torch.__version__} has no grouped_mm, which models of experts need on "
            "accelerators; install a newer torch, or give --device cpu"
        )
    count, parts = entry.groups.count, 2 if end else 1
    of_parts = [
        part.view(count, -1, part.shape[1]).transpose(1, 2)
        for part in tape.need(entry.slots[5]).chunk(parts)
    ]
    bias, biases = tape.weight(entry.slots[7]), list[Tensor]()
    if bias is not None:
        biases = [part.view(count, -1).to(tape.model.dtype) for part in bias.chunk(parts)]

    def run(step: Step) -> None:
        (routed,) = held
        sums = [F.grouped_mm(routed.rows, w, offs=routed.ends) for w in of_parts]
        if biases:
            pairs = zip(sums, biases, strict=True)
            sums = [rows + added[routed.experts] for rows, added in pairs]
        routed.rows = end(*sums) if end else sums[0]

    return run


def bind_combine(tape: TorchTape, entry: Entry) -> Work:
    """Add up what the experts of each row gave, by their weights."""
    _, k, hidden, _, _, _, _, residual, _, scale, out, _ = entry.slots
    each, columns, times = integer(k), integer(hidden), number(scale)
    target, held = tape.rows(out, columns, entry.m), _held(tape)
    adds = residual != WeightRef(name=None)

    def run(step: Step) -> None:
        (routed,) = held
        places = torch.empty_like(routed.order)
        places[routed.order] = torch.arange(len(places), device=places.device)
        given = routed.rows.index_select(0, places).view(-1, each, columns).float()
        total = (given * routed.weights[..., None]).sum(1) * times
        rows = target(step)
        rows.copy_(rows + total if adds else total)

    return run


def bind_row_gate(tape: TorchTape, entry: Entry) -> Work:
    """Multiply rows by a sigmoid each."""
    _, columns, gates, _, x, _ = entry.slots
    scores, rows = tape.rows(gates, 1, entry.m), tape.rows(x, integer(columns), entry.m)
    return lambda step: rows(step).mul_(torch.sigmoid(scores(step)))


def expert_operators(end: Pair) -> dict[str, Bind]:
    """Return what experts add to a decoder's operators, in place of its feed-forward products."""
    return {
        "route": bind_route,
        "sort_experts": lambda *_: lambda step: None,  # `bind_route` has sorted
        "expert_rows": bind_rows_of_experts,
        "gate_up": partial(bind_experts, end=end),
        "down": partial(bind_experts, end=None),
        "combine_experts": bind_combine,
        "row_gate": bind_row_gate,
    }
