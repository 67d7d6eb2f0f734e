"""Lift: hand-written C kernels (low IR) to the ISA-neutral high IR."""

from dovetail.codegen.lift.lift import lift, lift_function

__all__ = ["lift", "lift_function"]
