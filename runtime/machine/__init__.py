"""What this machine is, and what lies in its memory: CPUs, NUMA nodes, kernel libraries.

In: `/proc`, `/sys` and files of kernels. Out: the target to run, loaded libraries with the
addresses of their kernels, pages of memory on chosen nodes, and how busy CPUs are.
"""
