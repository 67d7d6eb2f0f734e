"""The engine: takes requests, runs planned steps on a device, turns logits into tokens.

In: requests. Out: tokens with log probabilities, figures of each step, and measured cost tables.
"""
