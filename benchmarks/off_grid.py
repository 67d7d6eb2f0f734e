"""A function-equivalent float copy of a model whose weights lie on no quantised grid.

In: a GGUF file of a Llama, such as one that was quantised once. Out: a Hugging Face directory and a
GGUF file of float32, with the same weights in both. Norm weights are folded into the products
behind them, and a random rotation turns the residual stream, so that all matrices are others and
the logits are the same. The head is no longer the embedding: it takes the last norm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from dovetail.compiler.models.source import CONFIG, ModelSource, open_model
from dovetail.compiler.request import COPIED_FILES
from generate_models import order_for_rope

Array = npt.NDArray[Any]
EMBED, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""A norm of a layer -> the products that read what it writes."""
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
"""The products that are added to the residual stream."""


def write_copies(model: Path, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write the copy of a GGUF file as `folder/rotated` and `folder/rotated.gguf`; return both."""
    source = open_model(model)
    directory, file = folder / "rotated", folder / "rotated.gguf"
    tensors = dict(rotate(source, seed))
    directory.mkdir(parents=True, exist_ok=True)
    config = dict(source.config().values)
    (directory / CONFIG).write_text(
        json.dumps(config | {"tie_word_embeddings": False, "torch_dtype": "float32"})
    )
    for name in COPIED_FILES:
        if (data := source.file(name)) is not None:
            (directory / name).write_bytes(data)
    save_file(tensors, directory / "model.safetensors")
    write_gguf(model, file, tensors, config)
    return directory, file


def rotate(source: ModelSource, seed: int) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of the copy by their Hugging Face names, float32."""
    checkpoint, config = source.checkpoint(), source.config().values

    def load(name: str) -> Array:
        values = checkpoint.load(name)
        return checkpoint.info(name).dtype.widen(values).astype(np.float64)

    width = config["hidden_size"]
    generator = np.random.default_rng(seed)
    turn, signs = np.linalg.qr(generator.standard_normal((width, width)))
    turn *= np.sign(np.diag(signs))
    ones = np.ones(width, np.float32)
    embed = load(EMBED)
    head = load(HEAD) if HEAD in checkpoint.tensors else embed
    yield EMBED, _single(embed @ turn)
    yield HEAD, _single((head * load(LAST_NORM)) @ turn)
    yield LAST_NORM, ones
    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}"
        for norm, readers in READERS.items():
            scale = load(f"{here}.{norm}.weight")
            yield f"{here}.{norm}.weight", ones.copy()
            for name in readers:
                yield (
                    f"{here}.{name}.weight",
                    _single((load(f"{here}.{name}.weight") * scale) @ turn),
                )
        for name in WRITERS:
            yield f"{here}.{name}.weight", _single(turn.T @ load(f"{here}.{name}.weight"))


def _single(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float32)


def write_gguf(like: Path, file: Path, tensors: dict[str, Array], config: dict[str, Any]) -> None:
    """Write float32 tensors as a GGUF file with the metadata of the file `like`."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    for name, field in gguf.GGUFReader(like).fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, values in tensors.items():
        found = names.get_name(name, (".weight",))
        writer.add_tensor(found, order_for_rope(name, values, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
