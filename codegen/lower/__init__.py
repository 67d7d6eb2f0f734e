"""Lowering: high-IR kernels, bound and for one target, become low-IR functions."""
