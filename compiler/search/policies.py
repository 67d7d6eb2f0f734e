"""The table of search policies by name."""

from __future__ import annotations

from dovetail.compiler.search.dietcode import DietCode
from dovetail.compiler.search.mikpoly import MikPoly
from dovetail.compiler.search.policy import Policy
from dovetail.compiler.search.roller import Roller
from dovetail.compiler.search.rules import Rules
from dovetail.compiler.search.sandwich import Sandwich

POLICIES: dict[str, Policy] = {
    "sandwich": Sandwich(),
    "roller": Roller(),
    "dietcode": DietCode(),
    "mikpoly": MikPoly(),
    "default": Rules(),
}
"""All choose among the same micro-kernels with the same Measurer."""
