"""The HTTP server: one OpenAI-compatible port over the models of one or more artifacts.

In: HTTP requests, checked and bounded. Out: answers, streams and metrics; errors as OpenAI's.
"""
