"""Random quantised weights for tests, and activations as kernels see them."""

from dovetail.compiler.measure.child import draw_blocks as random_blocks
from dovetail.compiler.measure.child import round_to_codes as round_activations

__all__ = ["random_blocks", "round_activations"]
