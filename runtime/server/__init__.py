"""The HTTP server: one OpenAI-compatible port over the models of one or more artifacts."""
