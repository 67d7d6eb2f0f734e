"""The fundamental TopoTree: what a HardwareSpec shows of the resources that PUs share.

In: a HardwareSpec. Out: a symmetric tree over allowed PUs, and notes on what had to be left out.
Real machines are irregular (offline PUs, unequal caches, two kinds of core, nodes without memory):
the tree is the largest symmetric part, and the notes say so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.ir.errors import SpecError
from dovetail.topology.tree import Level, TopoTree
from dovetail.topology.values import HardwareSpec

MAX_SHAPES = 32

Sets = frozenset[frozenset[int]]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fundamental:
    """The tree, and one sentence for each thing that it leaves out."""

    tree: TopoTree
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    kind: str
    sets: Sets


@dataclass(frozen=True, slots=True)
class _Node:
    """PUs of a set; `shapes` are the largest symmetric parts below it, none within another."""

    pu: int
    children: tuple[_Node, ...]
    shapes: tuple[Shape, ...]


def build_tree(spec: HardwareSpec) -> Fundamental:
    """Return the largest symmetric tree over the allowed PUs of `spec`.

    Raises SpecError when the spec allows no PU.
    """
    allowed = set(spec.allowed_pus)
    fastest = sorted((pu for pu in spec.pus if pu.id in allowed), key=lambda pu: -pu.capacity)
    kinds = _classes((pu.capacity, pu.id) for pu in fastest)
    if not kinds:
        raise SpecError("a topology needs at least one allowed PU")
    found = [_build(spec, frozenset(kind)) for kind in kinds]
    best = max(found, key=lambda item: len(item.tree.pus))
    notes = list(best.notes)
    if len(kinds) > 1:
        speed = next(pu.capacity for pu in spec.pus if pu.id == best.tree.pus[0])
        notes.insert(0, f"{len(kinds)} kinds of core: only those of capacity {speed} are used")
    left_out = len(allowed) - len(best.tree.pus)
    if left_out:
        notes.append(f"the largest symmetric part has {len(best.tree.pus)} of {len(allowed)} PUs")
    if spec.cpu_quota is not None and spec.cpu_quota < len(allowed):
        notes.append(f"a CPU quota of {spec.cpu_quota:.2f} cores slows {len(allowed)} PUs down")
    if len(spec.pus) > len(allowed):
        notes.append(f"{len(spec.pus) - len(allowed)} PUs are offline or not allowed")
    return Fundamental(best.tree, tuple(notes))


def _build(spec: HardwareSpec, pus: frozenset[int]) -> Fundamental:
    notes: list[str] = []
    layers: list[_Layer] = []
    for layer in _layers(spec, pus):
        if frozenset().union(*layer.sets) != pus:
            notes.append(f"{layer.kind} is known for some PUs only: the level is left out")
        elif any(_crosses(layer.sets, other.sets) for other in layers):
            notes.append(f"{layer.kind} cuts across other levels: it is left out")
        elif not any(layer.sets == other.sets for other in layers):
            layers.append(layer)
    # a level is finer the more sets it has; those of equal number are nested either way
    layers.sort(key=lambda layer: len(layer.sets))
    root = _nest(pus, [layer.sets for layer in layers])
    shape = _best_shape(root, [layer.kind for layer in layers])
    leaves = tuple(_leaves(root, shape))
    levels = _levels([layer.kind for layer in layers], shape)
    return Fundamental(TopoTree(levels, tuple(range(len(leaves))), leaves), tuple(notes))


def _levels(kinds: Sequence[str], shape: Shape) -> tuple[Level, ...]:
    """Drop levels of one child each; a cache of one core goes by the core's name."""
    levels = []
    for i, (kind, arity) in enumerate(zip(kinds, shape, strict=True)):
        alone = shape[i + 1 : i + 2] == (1,) and kinds[i + 1] == "core"
        if arity > 1:
            levels.append(Level("core" if alone else kind, arity, arity))
    return tuple(levels) or (Level(kinds[-1], 1, 1),)


def _layers(spec: HardwareSpec, pus: frozenset[int]) -> list[_Layer]:
    """Return the levels a spec shows, the ones that matter most first; each over `pus` only."""
    found: list[tuple[str, Iterable[Collection[int]]]] = [
        ("core", _classes((pu.core, pu.id) for pu in spec.pus)),
        ("numa", _homes(spec)),
        ("l3", _caches(spec, 3)),
        ("package", _classes((pu.socket, pu.id) for pu in spec.pus)),
        *((f"l{level}", _caches(spec, level)) for level in (2, 4, 1)),
        *_grouped(spec),
        ("pu", [(pu,) for pu in pus]),
    ]
    layers = []
    for kind, sets in found:
        kept = frozenset(inside for s in sets if (inside := frozenset(s) & pus))
        if kept:
            layers.append(_Layer(kind, kept))
    return layers


def _classes(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    classes: dict[int, list[int]] = {}
    for key, pu in pairs:
        classes.setdefault(key, []).append(pu)
    return [tuple(members) for members in classes.values()]


def _homes(spec: HardwareSpec) -> list[tuple[int, ...]]:
    """Return the PUs that have each node for their own; nodes may be nested in larger ones."""
    local = {node.id: set(node.pus) for node in spec.nodes}
    pairs = ((pu.node, pu.id) for pu in spec.pus if pu.id in local.get(pu.node, ()))
    return _classes(pairs)


def _caches(spec: HardwareSpec, level: int) -> list[tuple[int, ...]]:
    return [c.pus for c in spec.caches if c.level == level and c.kind != "instruction"]


def _grouped(spec: HardwareSpec) -> Iterable[tuple[str, list[tuple[int, ...]]]]:
    """Yield groups by kind, those nested in others of their own kind as a level of their own."""
    for kind in sorted({group.kind for group in spec.groups}):
        sets = [frozenset(group.pus) for group in spec.groups if group.kind == kind]
        ranks: dict[int, list[tuple[int, ...]]] = {}
        for inner in sets:
            ranks.setdefault(sum(inner < s for s in sets), []).append(tuple(inner))
        yield from ((kind, members) for _, members in sorted(ranks.items()))


def _crosses(left: Sets, right: Sets) -> bool:
    home = {pu: s for s in right for pu in s}
    for inside in left:
        touched = {home[pu] for pu in inside}
        if len(touched) > 1 and any(not s <= inside for s in touched):
            return True
    # both must also nest the same way round everywhere, or one order of levels does not fit
    finer = all(s <= home[next(iter(s))] for s in left)
    return not (finer or all(home[pu] <= s for s in left for pu in s))


def _nest(pus: frozenset[int], layers: Sequence[Sets]) -> _Node:
    if not layers:
        return _Node(min(pus), (), ((),))
    inside = sorted((s for s in layers[0] if s <= pus), key=min)
    children = tuple(_nest(s, layers[1:]) for s in inside)
    return _Node(min(pus), children, _shapes(children))


def _best_shape(root: _Node, kinds: Sequence[str]) -> Shape:
    """Return widths, root first, of the symmetric part with most PUs; then with most cores."""
    core = kinds.index("core") + 1 if "core" in kinds else len(kinds)
    return max(root.shapes, key=lambda shape: (prod(shape), prod(shape[:core]), shape))


def _shapes(children: Sequence[_Node]) -> tuple[Shape, ...]:
    found = set()
    for shape in _meets({shape for child in children for shape in child.shapes}):
        fitting = sum(any(_fits(shape, other) for other in child.shapes) for child in children)
        found.add((fitting, *shape))
    largest = [s for s in found if not any(s != other and _fits(s, other) for other in found)]
    return tuple(sorted(largest, key=prod, reverse=True)[:MAX_SHAPES])


def _fits(small: Shape, large: Shape) -> bool:
    return all(a <= b for a, b in zip(small, large, strict=True))


def _meets(shapes: set[Shape]) -> set[Shape]:
    """Return `shapes` and what pairs of them have in common, up to a limit."""
    found = set(shapes)
    for left in shapes:
        for right in shapes:
            if len(found) < MAX_SHAPES * MAX_SHAPES:
                found.add(tuple(min(a, b) for a, b in zip(left, right, strict=True)))
    return found


def _leaves(node: _Node, shape: Shape) -> Iterable[int]:
    if not shape:
        yield node.pu
        return
    fitting = [c for c in node.children if any(_fits(shape[1:], s) for s in c.shapes)]
    for child in fitting[: shape[0]]:
        yield from _leaves(child, shape[1:])
