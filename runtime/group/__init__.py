"""Ranks: a model on several processes, which each compute a part of every product.

In: an artifact for several processes, and plans of steps. Out: one result of a step, as one process
would give it; a rank that dies ends the group with an error. Ray may place the ranks.
"""
