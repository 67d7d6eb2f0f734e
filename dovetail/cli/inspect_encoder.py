"""What `dovetail inspect` says of a text encoder.

In: its encoder.json. Out: facts in words, by name.
"""

from __future__ import annotations

from dovetail.ir.encoder import EncoderFile, EncoderSpec


def encoder_facts(file: EncoderFile) -> dict[str, str]:
    """Return an encoder's architecture and what becomes of its last rows."""
    spec = file.spec
    kind = "gated " if spec.gated else ""
    norm = "before each half" if spec.norm_first else "after each sum"
    keys = f" on {spec.decoder.n_kv_heads} of keys" if spec.decoder else ""
    return {
        "family": spec.family,
        "layers": f"{spec.n_layers} x (hidden {spec.hidden_size}, {kind}{spec.activation} of "
        f"{spec.intermediate_size}), normed {norm}",
        "attention": f"{spec.n_heads} heads of {spec.head_dim}{keys}, {_show_reach(spec)}",
        "positions": _show_positions(spec),
        "vocabulary": f"{spec.vocab_size}, {spec.token_types or 'no'} token types",
        "longest text": f"{spec.max_tokens} tokens",
        "out": _show_end(spec),
        "prompts": ", ".join(f"`{name}`" for name in spec.prompts) or "none",
        "default prompt": "none" if spec.default_prompt is None else f"`{spec.default_prompt}`",
        "dtypes": f"weights {spec.weight_dtype} (checkpoint {spec.checkpoint_dtype})",
        "tokenizer": file.tokenizer or "none in the checkpoint: texts are token ids",
    }


def _show_reach(spec: EncoderSpec) -> str:
    local = sum(spec.local_layers)
    sides, whole = ("before", "text before") if spec.causal else ("to both sides", "whole text")
    near = f"{spec.reach} tokens {sides} in {local} layers, else " if local else ""
    return f"{near}over the {whole}"


def _show_positions(spec: EncoderSpec) -> str:
    if spec.rope is None:
        learned = spec.positions == "learned"
        shown = f"{spec.n_positions} learned" if learned else spec.positions
        return f"{shown}, and biases of distances" if spec.relative else shown
    ropes = {"": spec.rope, " in local layers": spec.local_rope}
    return ", ".join(
        f"rotary, {rope.kind}, theta {rope.theta:g}{where}" for where, rope in ropes.items() if rope
    )


def _show_end(spec: EncoderSpec) -> str:
    pooled = f"{spec.pooling} of a text's rows" if spec.pooling == "mean" else f"{spec.pooling} row"
    if spec.labels:
        score = ", a score is the sigmoid" if spec.sigmoid else ""
        return f"{spec.labels} logits of the {pooled}{score}"
    dense = "".join(f", times {layer.n} x {layer.k}" for layer in spec.dense)
    return f"{spec.dim} values, {pooled}{dense}{', of length 1' if spec.unit else ''}"
