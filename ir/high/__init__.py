"""The high IR: Python-like kernel text with a symbolic vector length and tunable parameters."""
