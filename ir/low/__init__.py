"""The low IR: the subset of C in which people hand-write kernels."""
