"""The simulated choice of plans against exhaustive search, on machines cut to a few cores.

In: a machine. Out: seconds per request of the pair that the search chooses, and of the best of all
pairs: every cross-section of every tree by every grouping and every removal, nothing pruned.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

from msgspec.structs import replace

from dovetail.ir.model import ModelSpec
from dovetail.topology.configuration import (
    Configuration,
    allows_processes,
    enumerate_configurations,
    memory_homes,
)
from dovetail.topology.contention import Simulator
from dovetail.topology.fundamental import build_tree
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.parameters import default_parameters
from dovetail.topology.plan import plan_topology
from dovetail.topology.replay import DEFAULT_TRACE, Replay
from dovetail.topology.transform import enumerate_groups
from dovetail.topology.tree import TopoTree

Scored = list[tuple[float, Configuration]]


def cut_machine(spec: HardwareSpec, cores: int) -> HardwareSpec:
    """Return the machine with at most `cores` cores allowed.

    Its widest levels are cut in turn, each by half at most. What is cut off still exists, as on a
    machine that one shares.
    """
    tree = build_tree(spec).tree
    while _cores(tree) > cores:
        depth = max(_core_levels(tree), key=lambda d: tree.levels[d - 1].arity)
        arity = tree.levels[depth - 1].arity
        kept = max(-(-arity // 2), cores * arity // _cores(tree))
        tree = tree.remove(arity - kept, depth)
    return replace(spec, allowed_pus=tuple(sorted(tree.pus)))


def compare(spec: HardwareSpec, model: ModelSpec) -> tuple[float, float, int]:
    """Return seconds per request of the choice and of the best pair, and the configurations."""
    chosen = plan_topology(spec, model, DEFAULT_TRACE).pairs[0].score.total
    replay = Replay(Simulator(spec, default_parameters(spec), model), DEFAULT_TRACE)
    found = {item.identity: item for item in every_configuration(spec, model)}
    prefill, decode = (
        sorted(((score(item), item) for item in found.values()), key=lambda pair: pair[0])
        for score in (replay.prefill, replay.decode)
    )
    return chosen, best_pair(replay, prefill, decode), len(found)


def gains_of_two_plans(spec: HardwareSpec, model: ModelSpec) -> tuple[float, float]:
    """Return the seconds per request of what serves with less freedom, over those of the choice.

    The best pair with as many processes in both phases, and the best one plan for both (§5).
    """
    found = plan_topology(spec, model, DEFAULT_TRACE)
    replay = Replay(Simulator(spec, found.parameters, model), DEFAULT_TRACE)
    pairs = [(p.prefill.configuration, p.decode.configuration) for p in found.pairs]
    even = [pair for pair in pairs if len(pair[0].processes) == len(pair[1].processes)]
    known = {c.configuration for c in (*found.prefill, *found.decode)} | {
        c for p in pairs for c in p
    }
    alike = [(each, each) for each in known]
    least = (min(replay.pair(*pair).total for pair in some) for some in (even, alike))
    of_even, of_one = (seconds / found.pairs[0].score.total for seconds in least)
    return of_even, of_one


def every_configuration(spec: HardwareSpec, model: ModelSpec) -> Iterator[Configuration]:
    """Yield the cross-sections of all trees, some of them more than once."""
    homes = memory_homes(spec)
    for grouped in enumerate_groups(build_tree(spec).tree, budget=10**6, every_divisor=True).trees:
        for kept in product(*(range(1, level.arity + 1) for level in grouped.tree.levels)):
            yield from enumerate_configurations(
                _keep(grouped.tree, kept), homes, lambda count: allows_processes(model, count)
            )


def best_pair(replay: Replay, prefill: Scored, decode: Scored) -> float:
    """Return the least seconds of any pair; both lists are sorted, and a switch costs 0 or more."""
    best = inf
    for before, first in prefill:
        for after, second in decode:
            if before + after >= best:
                break
            best = min(best, replay.pair(first, second).total)
    return best


def _keep(tree: TopoTree, widths: tuple[int, ...]) -> TopoTree:
    for depth, kept in enumerate(widths, 1):
        arity = tree.levels[depth - 1].arity
        tree = tree.remove(arity - kept, depth) if kept < arity else tree
    return tree


def _core_levels(tree: TopoTree) -> list[int]:
    return [d for d in range(1, tree.depth + 1) if tree.levels[d - 1].kind != "pu"]


def _cores(tree: TopoTree) -> int:
    return tree.width(_core_levels(tree)[-1])
