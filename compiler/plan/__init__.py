"""How one machine serves a model: processes, threads, CPUs, and who has which of them.

In: a machine's topology, its measured figures, a trace. Out: pairs of plans for prefill and decode,
simulated and then replayed on the sealed artifact; the division of the CPU among the stages of a
mixed load; what the searched schedules bought end to end.
"""
