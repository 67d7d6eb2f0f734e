"""Vector search in steps of clusters: cursors, budgets and histories, and the index they run on.

In: query vectors. Out: the nearest documents, the same however a search was cut and ordered.
"""
