"""Dovetail: compile a model, a machine, a workload and RAG workflows into one artifact, and serve it."""
