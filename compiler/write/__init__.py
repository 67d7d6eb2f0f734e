"""What is written: weights packed once, an artifact that is there whole or not at all, indexes.

In: a checkpoint with a format for each matrix, libraries, plans; a corpus and an encoder. Out:
`weights.bin` in chunks that threads hash as they write, an artifact's directory with its manifest,
an index folder; and the report of a compile.
"""
