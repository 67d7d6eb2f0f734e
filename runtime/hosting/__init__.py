"""Where an engine runs and how callers reach it: on a thread, or in a process of its own.

In: prompts and options from any thread or event loop. Out: jobs, which hold results and chunks.
"""
