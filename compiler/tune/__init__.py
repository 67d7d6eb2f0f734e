"""Jobs that search schedules without compiling: for a model, or for a kernel of the user's own.

In: a model or `OP=FILE`, a budget, workers on this machine or in a Ray cluster. Out: records in the
tuning database as soon as each batch is timed, so that a killed job goes on where it was; reports.
"""
