"""Decides what each step of the engine computes: pure values and plans, no tensors, no threads.

In: requests, the blocks that are free, cost tables, clocks that are given. Out: frozen plans: which
prompts and answers a step computes, on which device, and which KV moves.
"""
