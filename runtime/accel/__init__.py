"""Models on a torch device beside the CPU: the only room that imports torch.

In: an opened artifact, plans of steps, texts, clusters of an index. Out: the same tokens, vectors
and documents that the CPU gives; requests' attention is shared between device and CPU (NEO).
"""
