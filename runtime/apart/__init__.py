"""An engine in a process of its own: the app's side, the child, and what they say to each other.

The app keeps HTTP, templates, tokenising and text; the child has the engine with its kernels.
"""
