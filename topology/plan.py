"""Plans both phases of a model on a machine: trees, configurations, scores, the chosen pair.

In: a HardwareSpec, a ModelSpec, a trace, a budget. Out: a TopologyPlan that says what was looked
at, what was cut, and with which figures. Prefill uses trees with all cores; decode the grouped
trees and their descendants by `remove` (Sandwich §5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from dovetail.ir.errors import SpecError
from dovetail.ir.model import ModelSpec
from dovetail.topology.configuration import (
    Configuration,
    Ranking,
    allows_processes,
    enumerate_configurations,
    memory_homes,
)
from dovetail.topology.contention import Simulator
from dovetail.topology.fundamental import build_tree
from dovetail.topology.parameters import MachineParameters, default_parameters
from dovetail.topology.replay import DEFAULT_TRACE, PairScore, Replay, Trace
from dovetail.topology.transform import GroupSearch, enumerate_groups, walk_removals
from dovetail.topology.tree import TopoTree
from dovetail.topology.values import HardwareSpec


@dataclass(frozen=True, slots=True)
class PlanBudget:
    """Bounds of a search: trees by `group`, trees in all, candidates kept, patience (§5.3).

    every_divisor: groups of any size that divides; else of powers of two (A.3), unless the trees
    with all sizes are no more than `group_trees`.
    """

    group_trees: int = 256
    trees: int = 6000
    top: int = 10
    patience: int = 128
    every_divisor: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, its seconds per request in its phase, and the tree it was cut from."""

    configuration: Configuration
    seconds: float
    levels: str


@dataclass(frozen=True, slots=True)
class SearchReport:
    """What was looked at and what was not; `cut` has a sentence for each thing left out.

    group_trees_total: the trees there are with the group sizes that were used.
    """

    group_sizes: str
    patterns: tuple[str, ...]
    group_trees: int
    group_trees_total: int
    trees_scored: int
    trees_pruned: int
    configurations: int
    families_closed: int
    cut: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanPair:
    """A plan for each phase, and what a request takes under the two."""

    prefill: Candidate
    decode: Candidate
    score: PairScore


@dataclass(frozen=True, slots=True)
class TopologyPlan:
    """The pairs of plans with the lowest seconds per request, and what they were chosen from.

    pairs: the best one first. The best one with all cores in both phases is among them, if need be
    as the last, and the best one of the same processes in both.
    """

    notes: tuple[str, ...]
    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    pairs: tuple[PlanPair, ...]
    parameters: MachineParameters
    trace: Trace
    report: SearchReport


def plan_topology(
    spec: HardwareSpec,
    model: ModelSpec,
    trace: Trace = DEFAULT_TRACE,
    *,
    parameters: MachineParameters | None = None,
    budget: PlanBudget = PlanBudget(),
) -> TopologyPlan:
    """Return the best pair of plans for `model` on `spec` by the contention model.

    Raises:
        SpecError: the machine allows no PU, or the trace has no requests.
    """
    if not trace.requests:
        raise SpecError(f"trace {trace.source} has no requests to plan for")
    found = build_tree(spec)
    figures = parameters or default_parameters(spec)
    simulator = Simulator(spec, figures, model)
    replay = Replay(simulator, trace)
    groups = _enumerate(found.tree, budget)
    search = _Search(spec, model, budget, replay)
    search.prefill(groups)
    search.decode(groups)
    return TopologyPlan(
        notes=(*found.notes, *_memory_notes(spec, simulator.weights)),
        prefill=search.top(search.prefills),
        decode=search.top(search.decodes),
        pairs=_rank_pairs(search, replay, budget.top),
        parameters=figures,
        trace=trace,
        report=search.report(groups),
    )


def _memory_notes(spec: HardwareSpec, weights: int) -> tuple[str, ...]:
    if not 0 < spec.usable_memory < weights:
        return ()
    sizes = f"{weights >> 20} MiB, the memory {spec.usable_memory >> 20} MiB"
    return (f"the model does not fit: its weights have {sizes}",)


def _enumerate(tree: TopoTree, budget: PlanBudget) -> GroupSearch:
    every = enumerate_groups(tree, budget=budget.group_trees, every_divisor=True)
    if budget.every_divisor or every.total <= budget.group_trees:
        return every
    return enumerate_groups(tree, budget=budget.group_trees)


def describe_levels(tree: TopoTree) -> str:
    """Return the levels in one line, `core:3/4` where 3 of 4 are used."""
    shown = []
    for level in tree.levels:
        of = f"/{level.full}" if level.arity < level.full else ""
        shown.append(f"{level.kind}:{level.arity}{of}")
    return " ".join(shown)


class _Search:
    """Offers the cross-sections of trees to the ranking of each phase."""

    def __init__(
        self, spec: HardwareSpec, model: ModelSpec, budget: PlanBudget, replay: Replay
    ) -> None:
        self._homes = memory_homes(spec)
        allowed = set(spec.allowed_pus)
        self._cores = {pu.id: pu.core for pu in spec.pus if pu.id in allowed}
        self._allows = partial(allows_processes, model)
        self._budget = budget
        self._trees: dict[Configuration, TopoTree] = {}
        self._scored: dict[str, float] = {}
        self._pruned = self._unseen = self._starved = 0
        self.prefills = Ranking(replay.prefill, budget.patience)
        self.decodes = Ranking(replay.decode, budget.patience)

    def prefill(self, groups: GroupSearch) -> None:
        """Look at every grouped tree with all its cores, with each number of threads per core."""
        for grouped in groups.trees:
            tree = grouped.tree
            self._offer(self.prefills, tree)
            while tree.levels[-1].kind == "pu" and tree.levels[-1].arity > 1:
                tree = tree.remove(1, tree.depth)
                self._offer(self.prefills, tree)

    def decode(self, groups: GroupSearch) -> None:
        """Look at the descendants by `remove` of every grouped tree, the trees sharing a budget."""
        left = self._budget.trees
        for number, grouped in enumerate(groups.trees):
            share = left // (len(groups.trees) - number)
            if share < 1:
                self._starved += 1
                continue
            walk = walk_removals(grouped.tree, self._decode_score, budget=share)
            left -= walk.scored
            self._pruned += walk.pruned
            self._unseen += walk.unseen

    def _decode_score(self, tree: TopoTree) -> float:
        key = tree.hash()
        if key not in self._scored:
            self._scored[key] = self._offer(self.decodes, tree)
        return self._scored[key]

    def _offer(self, ranking: Ranking, tree: TopoTree) -> float:
        best = inf
        for configuration in enumerate_configurations(tree, self._homes, self._allows):
            best = min(best, ranking.offer(configuration))
            self._trees.setdefault(configuration, tree)
        return best

    def top(self, ranking: Ranking) -> tuple[Candidate, ...]:
        """Return the best candidates of a phase."""
        return tuple(self.candidate(c, s) for c, s in ranking.top(self._budget.top))

    def top_and_best(self, ranking: Ranking) -> tuple[Candidate, ...]:
        """Return the best candidates of a phase, and the best of each process number.

        And the best that have all cores, which serve where nothing is measured.
        """
        best: dict[tuple[int, bool], tuple[Configuration, float]] = {}
        for item in sorted(ranking.scores.items(), key=lambda item: item[1]):
            best.setdefault((len(item[0].processes), False), item)
            if self.whole(item[0]):
                best.setdefault((len(item[0].processes), True), item)
        others = (self.candidate(*item) for item in best.values())
        return tuple(dict.fromkeys((*self.top(ranking), *others)))

    def whole(self, configuration: Configuration) -> bool:
        """Tell whether a configuration has every core that this process may use."""
        return {self._cores[pu] for pu in configuration.pus} == set(self._cores.values())

    def candidate(self, configuration: Configuration, seconds: float) -> Candidate:
        """Return a configuration with the tree it came from."""
        return Candidate(configuration, seconds, describe_levels(self._trees[configuration]))

    def report(self, groups: GroupSearch) -> SearchReport:
        """Say what was looked at and what was cut."""
        closed = self.prefills.closed | self.decodes.closed
        left_out = groups.total - len(groups.trees)
        longest = max(len(item.steps) for item in groups.trees)
        patterns = (
            f"{left_out} of {groups.total} group patterns, those of {longest} or more groupings"
        )
        starved = f"decode trees of {self._starved} group patterns: the tree budget was spent"
        unseen = f"{self._unseen} trees by remove: the budget of their pattern was spent"
        families = f"{len(closed)} families of equal processes and memory, by patience"
        cut = {patterns: left_out, starved: self._starved, unseen: self._unseen, families: closed}
        return SearchReport(
            group_sizes="every divisor" if groups.every_divisor else "powers of two",
            patterns=tuple(dict.fromkeys(map(str, groups.trees))),
            group_trees=len(groups.trees),
            group_trees_total=groups.total,
            trees_scored=len(self._scored),
            trees_pruned=self._pruned,
            configurations=self.prefills.seen + self.decodes.seen,
            families_closed=len(closed),
            cut=tuple(text for text, count in cut.items() if count),
        )


def _rank_pairs(search: _Search, replay: Replay, count: int) -> tuple[PlanPair, ...]:
    """Return the `count` best pairs.

    Among them are the best one with all cores in both phases and the best one of as many processes
    in both, where there are such.
    """
    decodes = search.top_and_best(search.decodes)
    pairs = [
        PlanPair(p, d, replay.pair(p.configuration, d.configuration))
        for p in _with_families(search.top_and_best(search.prefills), search, decodes)
        for d in decodes
    ]
    pairs.sort(key=lambda pair: pair.score.total)

    def whole(pair: PlanPair) -> bool:
        return all(search.whole(c.configuration) for c in (pair.prefill, pair.decode))

    def even(pair: PlanPair) -> bool:
        return len({len(c.configuration.processes) for c in (pair.prefill, pair.decode)}) == 1

    wanted = [next(filter(rule, pairs), None) for rule in (whole, even)]
    last = [pair for pair in dict.fromkeys(wanted) if pair and pair not in pairs[:count]]
    return (*pairs[: count - len(last)], *last)


def _with_families(
    best: Sequence[Candidate], search: _Search, decode: Sequence[Candidate]
) -> list[Candidate]:
    """Add to the best prefill candidates the best of each family that decode candidates have."""
    wanted = {item.configuration.family for item in decode}
    found = list(best)
    ranked = sorted(search.prefills.scores.items(), key=lambda item: item[1])
    for configuration, seconds in ranked:
        if configuration.family in wanted:
            wanted.remove(configuration.family)
            found.append(search.candidate(configuration, seconds))
    return found
