"""What one step of a model runs, as a tape: a flat list of kernel calls over planned buffers.

In: a model's spec and the index of its weights. Out: the tapes of a step, of one with rows of
adapters, of sampling and of an encoder's pass, with barriers where one call reads what another
writes; and a check of a tape against all that it refers to.
"""
