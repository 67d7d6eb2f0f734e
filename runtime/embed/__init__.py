"""Embedding service: a queue per device sized from an SLO, the CPU takes the overflow (WindVE §IV).

In: texts or token ids. Out: vectors in order, or an honest BUSY.
"""
