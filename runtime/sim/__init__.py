"""Simulations in virtual time of engines, queues and workflows on assumed or measured machines.

In: cost tables, arrivals. Out: figures that are labelled *simulated*. Only benchmarks and
`dovetail bench` import this room.
"""
