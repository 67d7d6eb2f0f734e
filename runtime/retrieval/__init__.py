"""The retrieval worker: searches of all requests in pieces, in a process of its own.

In: query vectors, and how much of which search to do now. Out: the nearest documents, the same
however a search was cut and ordered. Hot clusters may lie in an accelerator's memory.
"""
