"""Models on a torch device beside the CPU: the only room that imports torch."""
