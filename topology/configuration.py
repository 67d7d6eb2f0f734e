"""From a TopoTree to service configurations: processes, their PUs and memory (Sandwich §5.3).

In: a tree and which NUMA node each PU uses. Out: one configuration per horizontal cross-section,
those an operator forbids left out; and a ranking that stops looking where nothing is won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from dovetail.ir.formats import cut_unit, inner_unit
from dovetail.ir.model import ROWS, ModelSpec
from dovetail.topology.tree import TopoTree
from dovetail.topology.values import HardwareSpec

Family = tuple[int, tuple[tuple[int, ...], ...]]
"""Process number, and the memory nodes of each process in order."""


@dataclass(frozen=True, slots=True)
class Process:
    """One tensor-parallel rank: its PUs, and the NUMA nodes that these use."""

    pus: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Processes in the order of the tree. Equal processes in any order make it the same."""

    processes: tuple[Process, ...]

    @property
    def pus(self) -> tuple[int, ...]:
        """All PUs, process by process."""
        return tuple(pu for process in self.processes for pu in process.pus)

    @property
    def family(self) -> Family:
        """What patience is counted within."""
        return len(self.processes), tuple(sorted(process.nodes for process in self.processes))

    @property
    def identity(self) -> frozenset[frozenset[int]]:
        """Equal for configurations that differ in the order of processes and PUs only."""
        return frozenset(frozenset(process.pus) for process in self.processes)


def memory_homes(spec: HardwareSpec) -> dict[int, int]:
    """Return PU -> the NUMA node it uses."""
    return {pu.id: pu.node for pu in spec.pus}


def cross_section(tree: TopoTree, depth: int, homes: Mapping[int, int]) -> Configuration:
    """Return the configuration with one process per node at `depth` (0 = one process)."""
    return Configuration(
        tuple(
            Process(pus, tuple(sorted({homes[pu] for pu in pus}))) for pus in tree.subtrees(depth)
        )
    )


def allows_processes(model: ModelSpec, count: int) -> bool:
    """Tell whether the operators of `model` can be cut into `count` equal shards.

    Whole KV heads and query heads per rank (§5.3), and whole panels of the packed weights.
    """
    widths = [part.columns for part in model.all_mlp_parts()]
    if count > 1 and model.qk_norm and model.qk_norm_of == ROWS:
        return False
    return (
        model.n_kv_heads % count == 0
        and (count == 1 or not model.uneven)
        and model.n_heads % count == 0
        and (count == 1 or all(n % (count * inner_unit(model)) == 0 for n in widths))
        and (count == 1 or model.n_heads // count * model.head_dim % cut_unit(model, "o") == 0)
    )


def enumerate_configurations(
    tree: TopoTree, homes: Mapping[int, int], allows: Callable[[int], bool]
) -> Iterator[Configuration]:
    """Yield the cross-sections of `tree` from the root down whose process number is allowed."""
    counts: set[int] = set()
    for depth in range(tree.depth + 1):
        count = tree.width(depth)
        if count not in counts and allows(count):
            counts.add(count)  # a level of one child each cuts as the level above it does
            yield cross_section(tree, depth, homes)


@dataclass(slots=True)
class Ranking:
    """Scores each configuration once, lower is better; §5.3's three prunings.

    After `patience` configurations of one family in a row that do not beat the best of all, the
    family is closed: nothing of it is scored again, and what was scored of it is discarded, unless
    the best of all is among it.
    """

    score: Callable[[Configuration], float]
    patience: int = 128
    scores: dict[Configuration, float] = field(default_factory=dict)
    closed: set[Family] = field(default_factory=set)
    best: float = inf
    seen: int = 0
    _known: dict[frozenset[frozenset[int]], float] = field(default_factory=dict)
    _misses: dict[Family, int] = field(default_factory=dict)

    def offer(self, configuration: Configuration) -> float:
        """Return the score of a configuration; infinite where its family is closed."""
        key = configuration.identity
        if key in self._known:
            return self._known[key]
        family = configuration.family
        if family in self.closed:
            return inf
        score = self._known[key] = self.score(configuration)
        self.seen += 1
        self.scores[configuration] = score
        if score < self.best:
            self.best = score
            self._misses[family] = 0
        else:
            self._misses[family] = self._misses.get(family, 0) + 1
            if self._misses[family] >= self.patience:
                self._close(family)
        return score

    def top(self, count: int) -> list[tuple[Configuration, float]]:
        """Return the `count` best that were not discarded, the best first.

        Of those alike in processes, memory, threads and score, the one that was found first.
        """
        found: dict[object, tuple[Configuration, float]] = {}
        for configuration, score in sorted(self.scores.items(), key=lambda item: item[1]):
            threads = tuple(sorted(len(process.pus) for process in configuration.processes))
            found.setdefault(
                (configuration.family, threads, f"{score:.9e}"), (configuration, score)
            )
        return list(found.values())[:count]

    def _close(self, family: Family) -> None:
        self.closed.add(family)
        members = [c for c in self.scores if c.family == family]
        if all(self.scores[c] > self.best for c in members):
            for configuration in members:
                del self.scores[configuration]
