"""The rivals of the kernel search, each as its paper says, on the same micro-kernels.

In: a `SearchTask` and a `Measurer`. Out: a `Found`: at each M the regions of the product with their
programs, none where a policy has no program. None of them falls back to our rules.
"""

from __future__ import annotations

from dovetail.compiler.search.rules import Rules
from dovetail.compiler.search.sandwich import Sandwich
from rivals.ansor import Ansor
from rivals.dietcode import DietCode
from rivals.mikpoly import MikPoly
from rivals.result import Searcher
from rivals.roller import Roller

POLICIES: dict[str, Searcher] = {
    "sandwich": Sandwich(),
    "roller": Roller(),
    "dietcode": DietCode(),
    "mikpoly": MikPoly(),
    "ansor": Ansor(),
    "default": Rules(),
}
"""All choose among the same micro-kernels with the same Measurer; ours is first."""
