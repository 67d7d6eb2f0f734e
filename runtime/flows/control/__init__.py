"""Wavefront: all requests' workflows in sub-stages over one engine and one index (HedraRAG §4.5).

In: runs of workflows, and what executors tell. Out: orders for executors. Pure, with a given clock.
"""
