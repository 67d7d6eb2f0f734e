"""Which micro-kernel, computation slice and thread grid serves which M.

In: products with the M of a workload, a `Measurer`, records, a budget. Out: schedule tables with
where each row comes from; the tiles of attention kernels; whether a user's kernels take the place
of ours; what was gained over the rules. `choose` has the order in which all this is asked.
"""
