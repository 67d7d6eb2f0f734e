"""The peers of `generate.py`: transformers, llama.cpp, OpenVINO GenAI. Each is optional.

In: a checkpoint directory. Out: each peer's files of the same weights, and sides with `settings`
and `run`, for `generate_workers.Worker`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import timed_region
from generate_workers import Transformers

Array = npt.NDArray[Any]

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
"""Names of a Llama checkpoint's tensors, and theirs in GGUF."""
GGUF_FORMS = {"float32": "F32", "bfloat16": "BF16"}


def write_gguf(checkpoint: Path, target: Path, form: str | None = None) -> None:
    """Write the checkpoint as a GGUF file without a vocabulary, its weights in their own width.

    With `form`, such as F16, they have another.
    """
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    form = form or GGUF_FORMS[config["torch_dtype"]]
    part = target.with_name(f"{target.name}.part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if form == "F32" else f"MOSTLY_{form}"])
    for name, values in read_tensors(checkpoint):
        kind = gguf.GGMLQuantizationType[form if values.ndim > 1 else "F32"]
        data = gguf.quants.quantize(order_for_rope(name, values, config), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of a checkpoint as float32."""
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name).float().numpy()


def gguf_name(name: str) -> str:
    """Return the GGUF name: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{LAYER_NAMES['.'.join(parts[2:])]}.weight"
    return f"{OUTER_NAMES['.'.join(parts)]}.weight"


def order_for_rope(name: str, values: Array, config: dict[str, Any]) -> Array:
    """Return q and k with each head's rows in pairs (d, d + half), as llama.cpp rotates them."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if part in name:
            split = values.reshape(config[key], 2, -1, values.shape[1])
            return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
    return values


def write_openvino(checkpoint: Path, target: Path) -> None:
    """Write the checkpoint as OpenVINO GenAI's own float32 IR of a Llama, with some tokenizer.

    GenAI makes it of a GGUF file in float16, which holds these checkpoints exactly; its constants
    are then widened, so that float32 is what a step reads.
    """
    import openvino
    import openvino_genai

    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as work:
        narrow, part = Path(work) / "model.gguf", Path(work) / "wide"
        part.mkdir()
        write_gguf(checkpoint, narrow, "F16")
        write_tokenizer(part)
        tokenizer = openvino_genai.Tokenizer(str(part))
        openvino_genai.LLMPipeline(str(narrow), tokenizer, "CPU", enable_save_ov_model=True)
        narrow.unlink()
        model = openvino.Core().read_model(narrow.with_name("openvino_model.xml"))
        widen(model)
        openvino.save_model(model, part / "openvino_model.xml", compress_to_fp16=False)
        shutil.move(part, target)


def widen(model: Any) -> None:
    """Replace the float16 constants of a model, and what converts them, by float32 ones."""
    from openvino import Type, opset13

    for node in model.get_ops():
        if node.get_type_name() != "Convert" or node.get_output_element_type(0) != Type.f32:
            continue
        source = node.input_value(0).get_node()
        if source.get_type_name() == "Constant" and source.get_output_element_type(0) == Type.f16:
            wide = opset13.constant(source.get_data().astype(np.float32))
            node.output(0).replace(wide.output(0))


def write_tokenizer(directory: Path) -> None:
    """Write a byte tokenizer: GenAI wants one, though it only sees ids here."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    known = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=alphabet[0])
    pair = convert_tokenizer(known, with_detokenizer=True)
    for name, model in zip(("tokenizer", "detokenizer"), pair, strict=True):
        openvino.save_model(model, directory / f"openvino_{name}.xml")


class OpenVino:
    """OpenVINO GenAI in float32, keys and values too; loaded anew for another number of threads."""

    def __init__(self, model: str) -> None:
        import openvino
        import openvino_genai

        self._tensor, self._api = openvino.Tensor, openvino_genai
        self._model, self._threads = model, 0
        self._pipeline: Any = None

    def settings(self) -> str:
        """Return what a reader needs to know of this peer."""
        return f"OpenVINO GenAI {version('openvino-genai')}, float32 weights, KV and arithmetic"

    def run(self, prompt: list[int], new_tokens: int, threads: int) -> dict[str, Any]:
        """Generate greedily; return seconds to the first token and per further one, and the ids."""
        if threads != self._threads:
            self._load(threads)
        ids = np.array([prompt])
        inputs = self._api.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        options = {"max_new_tokens": new_tokens, "ignore_eos": True, "do_sample": False}
        with timed_region() as region:
            found = self._pipeline.generate(inputs, self._api.GenerationConfig(**options))
        metrics = found.perf_metrics
        return {
            "prefill": metrics.get_ttft().mean / 1e3,
            "decode": metrics.get_tpot().mean / 1e3,
            "ids": list(found.tokens[0]),
            "others": region.others,
        }

    def _load(self, threads: int) -> None:
        scheduler = self._api.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # a prompt that is run again must cost the same
        scheduler.max_num_batched_tokens = 4096
        scheduler.cache_size = 1  # GiB of keys and values
        self._pipeline = None  # its memory goes back first
        self._pipeline = self._api.LLMPipeline(
            self._model,
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_PRECISION_HINT="f32",
            KV_CACHE_PRECISION="f32",
            INFERENCE_NUM_THREADS=threads,
        )
        self._threads = threads


class LlamaCpp:
    """llama.cpp with its own defaults: float16 keys and values, weights as they are in the file."""

    def __init__(self, model: str) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._model = llama_cpp.Llama(model, n_ctx=0, n_batch=512, verbose=False)

    def settings(self) -> str:
        """Return what a reader needs to know of this peer."""
        return f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}), float16 KV, mmap"

    def run(self, prompt: list[int], new_tokens: int, threads: int) -> dict[str, Any]:
        """Generate greedily; return seconds to the first token and per further one, and the ids."""
        self._api.llama_set_n_threads(self._model.ctx, threads, threads)
        self._model.reset()
        self._api.llama_memory_clear(self._api.llama_get_memory(self._model.ctx), False)
        with timed_region() as region:
            start = time.perf_counter()
            self._model.eval(prompt)
            ids = [self._best()]
            first = time.perf_counter()
            for _ in range(new_tokens - 1):
                self._model.eval(ids[-1:])
                ids.append(self._best())
            last = time.perf_counter()
        return {
            "prefill": first - start,
            "decode": (last - first) / (new_tokens - 1),
            "ids": ids,
            "others": region.others,
        }

    def _best(self) -> int:
        """Return the id of the largest logit of the last token."""
        logits = self._api.llama_get_logits_ith(self._model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self._model.n_vocab(),)).argmax())


@dataclass(frozen=True, slots=True)
class Peer:
    """Modules a peer needs, dtypes it is compared in, how its files are made, and its side.

    Without `prepare` it reads the checkpoint itself; else `prepare(checkpoint, target)` writes what
    it reads, named by `suffix`.
    """

    modules: tuple[str, ...]
    dtypes: tuple[str, ...]
    side: Callable[[str], Any]
    suffix: str = ""
    prepare: Callable[[Path, Path], None] | None = None

    def path(self, checkpoint: Path) -> Path:
        """Return what the side reads."""
        return checkpoint.with_name(checkpoint.name + self.suffix)

    @property
    def missing(self) -> list[str]:
        """Return the modules that are not installed."""
        return [name for name in self.modules if find_spec(name) is None]


PEERS = {
    "transformers": Peer(("transformers", "torch"), ("f32", "bf16"), Transformers),
    "llamacpp": Peer(("llama_cpp", "gguf"), ("f32", "bf16"), LlamaCpp, ".gguf", write_gguf),
    "openvino": Peer(
        ("openvino_genai", "openvino_tokenizers", "gguf"),
        ("f32",),
        OpenVino,
        "-openvino",
        write_openvino,
    ),
}
