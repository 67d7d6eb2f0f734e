"""Files as others wrote them: configurations, and tensors by name.

In: a JSON text, safetensors and GGUF files, blocks of quantised values. Out: typed, bounded values,
or an error that names the key; tensors whose rows are mapped when asked for; codes and scales of
our own formats. Nothing here knows what a model is.
"""
