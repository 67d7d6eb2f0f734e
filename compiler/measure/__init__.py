"""Times of kernels: measured in child processes, checked against float64, kept on record.

In: a kernel library, cases and candidate schedules; a tuning database. Out: a `Measurement` for
each candidate and a record of each trial, whatever a kernel does to its process; what this machine
does at most; answers that earlier compiles found.
"""
