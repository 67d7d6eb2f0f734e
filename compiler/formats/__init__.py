"""In which format each matrix is stored.

In: what was asked for, what the checkpoint has, tensors as float rows. Out: a format for every
matrix, by the error that it would have there; codes and scales with the least squared error.
"""
