"""A name to a model: where it comes from, and what it is.

In: an id of the hub, a Hugging Face directory, a GGUF file, folders of LoRA adapters. Out: an
opened source with all tensors by the names of Hugging Face, a `ModelSpec` or an `EncoderSpec`.
What is not computed is refused here, with the key or tensor at fault.
"""
