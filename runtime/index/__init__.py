"""An IVF index that is searched cluster by cluster, and the documents beside it.

In: vectors or index folders. Out: cursors (searches that can stop and go on) and scans of clusters,
by generated kernels or faiss.
"""
