"""Lowering: high-IR kernels, bound and for one target, become low-IR functions."""

from dovetail.codegen.lower.pipeline import bind_tunables, find_kernel, flatten, lower

__all__ = ["bind_tunables", "find_kernel", "flatten", "lower"]
