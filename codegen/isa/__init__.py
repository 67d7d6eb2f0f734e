"""Instruction tables: one module per instruction set."""
