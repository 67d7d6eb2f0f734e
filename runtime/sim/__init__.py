"""Simulations in virtual time of engines and queues on assumed or measured machines.

In: cost tables, arrivals. Out: figures that are labelled *simulated*. Only benchmarks and
`dovetail bench` import this room.
"""
