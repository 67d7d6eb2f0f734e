"""Runs a model's tape with native kernels on the CPU.

In: an opened artifact, plans of steps. Out: logits of a step, or vectors of texts. Weights are
mapped as they lie, a tape is bound to kernels and buffers once, and a step is one call into
native code.
"""
