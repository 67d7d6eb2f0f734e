"""What serves where nothing was measured: products, micro-kernels and schedules by rules.

In: a model's spec, a target, a machine, a trace of requests. Out: the matrix products of a step and
how often each number of rows occurs, the micro-kernels that may compute them, schedule tables that
cover every M, and the kernels that all models share.
"""
