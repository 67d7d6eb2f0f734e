"""Our search policy, each time without one of its parts: what ablations compare with the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from dovetail.compiler.rules.schedules import MicroKernel
from dovetail.compiler.search.policy import Bench
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.compiler.search.space import Program, Scheme


class OneMicroKernel(Sandwich):
    """Takes the rules' micro-kernel."""

    def tiles(self, bench: Bench, history: Sequence[Program]) -> tuple[MicroKernel, ...]:
        """Return the one of the default."""
        return (bench.default.tile,)


class OneScheme(Sandwich):
    """Takes the rules' thread grid."""

    def schemes(self, bench: Bench) -> tuple[Scheme, ...]:
        """Return the one of the default."""
        return (bench.default.scheme,)


class WholeK(Sandwich):
    """Shares no K out among threads."""

    def schemes(self, bench: Bench) -> tuple[Scheme, ...]:
        """Return those that share out rows and columns."""
        return bench.problem.schemes(split_k=False)


class SeedSlices(Sandwich):
    """Takes the rules' slices, or none."""

    def grow_slices(self, bench: Bench) -> None:
        """Grow none."""


class OneOrder(Sandwich):
    """Leaves the loops of slices in their first order."""

    def vary_orders(self, bench: Bench) -> None:
        """Try none."""


class NoReuse(Sandwich):
    """Searches slices at every M."""

    def settled_on(self, history: Sequence[Program]) -> Program | None:
        """Return nothing: no slice is fixed."""
        return None


class NoDistances(Sandwich):
    """Takes the rules' prefetch distances."""

    def vary_prefetch(self, bench: Bench) -> None:
        """Try no other."""


ABLATED: dict[str, type[Sandwich]] = {
    "no micro-kernel choice": OneMicroKernel,
    "no polymerization": OneScheme,
    "no split-K": WholeK,
    "no slices": SeedSlices,
    "no loop orders": OneOrder,
    "no reuse": NoReuse,
    "no prefetch distances": NoDistances,
}


def without(part: type[Sandwich], whole: Sandwich) -> Sandwich:
    """Return a policy with the settings of the whole one."""
    return part(**{field.name: getattr(whole, field.name) for field in fields(whole)})
