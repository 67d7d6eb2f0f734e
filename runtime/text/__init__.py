"""Texts to token ids and back; conversations to prompts by the model's own template.

In: texts, messages. Out: token ids that fit the context, and texts cut only between characters.
"""
