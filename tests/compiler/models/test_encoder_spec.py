"""Directories of encoders: what is read from them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from dovetail.compiler.encoder_pipeline import read_encoder_inputs
from dovetail.compiler.families.encoder_tensors import alibi_slopes, encoder_tables
from dovetail.compiler.files.checkpoint import open_checkpoint
from dovetail.compiler.models.encoder_folder import is_encoder
from dovetail.compiler.models.encoder_spec import read_encoder_spec
from dovetail.compiler.request import CompileRequest
from dovetail.ir.errors import SpecError
from dovetail.tiny_world import ENCODER, LLAMA
from tests.encoders import (
    MODERN,
    PADDED,
    Dense,
    Jina,
    save_decoder,
    save_encoder,
    write_modules,
    write_nomic_words,
)
from tests.rerankers import write_tokenizer

BACKWARDS = ("Transformer", "Pooling", "Normalize", "Dense")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_encoder(folder, "bert")
    return folder


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modern")
    options = {"num_hidden_layers": 4, "local_attention": 128}
    save_encoder(folder, "modernbert", **{**MODERN, **options})
    return folder


@pytest.fixture(scope="module")
def nomic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nomic")
    save_encoder(folder, "nomic")
    return folder


def copy(bert: Path, to: Path, **changes: Any) -> Path:
    """Link the weights, and write config.json with `changes`; None takes a key away."""
    to.mkdir(exist_ok=True)
    (to / "model.safetensors").symlink_to(bert / "model.safetensors")
    config = json.loads((bert / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (to / "config.json").write_text(json.dumps(kept))
    return to


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_the_bundled_encoder() -> None:
    spec = read_encoder_spec(ENCODER)
    assert (spec.pooling, spec.unit, spec.max_tokens, spec.dim) == ("mean", True, 256, 128)
    assert is_encoder(ENCODER)
    assert not is_encoder(LLAMA)
    assert not is_encoder(ENCODER / "nowhere")


def test_a_plain_directory_gives_means_of_any_length(bert: Path, tmp_path: Path) -> None:
    spec = read_encoder_spec(copy(bert, tmp_path / "m"))
    assert (spec.pooling, spec.unit, spec.max_tokens) == ("mean", False, 512)
    assert read_encoder_spec(bert, max_tokens=100, weight_dtype="bf16").max_tokens == 100


def test_the_files_of_sentence_transformers(bert: Path, tmp_path: Path) -> None:
    folder = copy(bert, tmp_path / "m")
    write_modules(folder, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": False})
    prompts = {"query": "Ask: ", "document": ""}
    given = {"prompts": prompts, "default_prompt_name": "query"}
    write(folder / "config_sentence_transformers.json", given)
    spec = read_encoder_spec(folder)
    assert (spec.pooling, spec.unit, spec.max_tokens) == ("cls", True, 128)
    assert (spec.prompts, spec.default_prompt) == (prompts, "query")


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_letters_become_small_where_a_folder_says_so(
    bert: Path, tmp_path: Path, normalizer: object
) -> None:
    folder = copy(bert, tmp_path / "m")
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    write(file, json.loads(file.read_text()) | {"normalizer": normalizer})
    write(folder / "sentence_bert_config.json", {"do_lower_case": True})
    request = CompileRequest(model=folder, output=tmp_path / "app.dove", effort="none")
    found = Tokenizer.from_str((read_encoder_inputs(request).tokenizer or b"").decode())
    plain = Tokenizer.from_file(str(file))
    text = "The LAMP"
    assert found.encode(text).ids == plain.encode(text.lower()).ids != plain.encode(text).ids


def test_settings_of_the_transformer_lie_beside_it(bert: Path, tmp_path: Path) -> None:
    """Older models of sentence-transformers have it in a folder of its own."""
    (root := tmp_path / "m").mkdir()
    inner = copy(bert, root / "0_Transformer")
    write_tokenizer(inner)
    write(root / "modules.json", [{"type": "models.Transformer", "path": inner.name}])
    settings = {"max_seq_length": 128, "do_lower_case": True}
    write(inner / "sentence_bert_config.json", settings)
    request = CompileRequest(model=root, output=tmp_path / "app.dove", effort="none")
    found = read_encoder_inputs(request)
    assert found.spec.max_tokens == 128
    assert b'"Lowercase"' in (found.tokenizer or b"")


def test_e5_models_have_their_prompts(bert: Path, tmp_path: Path) -> None:
    spec = read_encoder_spec(copy(bert, tmp_path / "multilingual-e5-small"))
    assert spec.prompts["query"] == "query: "
    assert spec.default_prompt is None


@pytest.mark.parametrize("name", ["multilingual-e5-large-instruct", "e5-mistral-7b-instruct"])
def test_of_e5_models_that_are_instructed_only_queries_are(
    bert: Path, tmp_path: Path, name: str
) -> None:
    prompts = read_encoder_spec(copy(bert, tmp_path / name)).prompts
    assert list(prompts) == ["query"]
    assert prompts["query"].startswith("Instruct: ")
    assert prompts["query"].endswith("\nQuery: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 8}, "heads of 8 values"),
        ({"num_attention_heads": 7}, "multiple of num_attention_heads"),
        ({"vocab_size": 299}, "word_embeddings.weight has shape"),
        ({"num_hidden_layers": 1}, "encoder.layer.1.* is not part"),
        ({"num_hidden_layers": 3}, "no tensor encoder.layer.2"),
        ({"quantization_config": {}}, "quantized"),
        ({"architectures": ["T5Model"]}, "T5Model is not a supported encoder"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps"),
    ],
)
def test_what_is_not_computed_is_refused(
    bert: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        read_encoder_spec(copy(bert, tmp_path / "m", **changes))


def test_modern_bert_tells_of_its_layers(modern: Path, tmp_path: Path) -> None:
    spec = read_encoder_spec(modern)
    assert spec.local_layers == (False, True, True, False)
    assert (spec.norm_first, spec.gated, spec.reach, spec.norm_eps) == (True, True, 64, 1e-5)
    assert spec.rope and spec.local_rope
    assert (spec.rope.theta, spec.local_rope.theta) == (160000.0, 10000.0)
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 5e4, "local_attention": 30}
    taken = {"layer_types": None, "rope_parameters": None}
    spec = read_encoder_spec(copy(modern, tmp_path / "m", **older, **taken))
    assert (spec.local_layers, spec.reach) == ((False, True, False, True), 15)
    assert spec.rope and spec.rope.theta == 5e4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias is true, but of modernbert models only False"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"intermediate_size": 60}, "mlp.Wi.weight has shape"),
    ],
)
def test_what_modern_bert_may_not_be(
    modern: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        read_encoder_spec(copy(modern, tmp_path / "m", **changes))


def test_jina_without_its_positions_or_gate_is_refused(tmp_path: Path) -> None:
    jina = tmp_path / "jina"
    Jina(layers=1).save(jina)
    spec = read_encoder_spec(jina)
    assert (spec.positions, spec.gated, spec.max_tokens) == ("alibi", True, 8192)
    for number, changes in enumerate(
        ({"feed_forward_type": "reglu"}, {"position_embedding_type": "absolute"})
    ):
        with pytest.raises(SpecError, match=next(iter(changes))):
            read_encoder_spec(copy(jina, tmp_path / str(number), **changes))


def test_the_rope_of_gte_may_be_stretched(tmp_path: Path) -> None:
    save_encoder(tmp_path / "gte", "gte", pad_token_id=0)
    scaling = {"rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 2.0}}
    spec = read_encoder_spec(copy(tmp_path / "gte", tmp_path / "m", **scaling))
    cos = encoder_tables(spec, open_checkpoint(tmp_path / "gte"))["rope_cos"]
    angles = 1000.0 ** -(np.arange(0, 16, 2) / 16) / 2 ** (2 / 16)
    np.testing.assert_allclose(cos[100], np.cos(100 * angles), atol=1e-5)
    logn = copy(tmp_path / "gte", tmp_path / "n", logn_attention_scale=True)
    with pytest.raises(SpecError, match="logn_attention_scale"):
        read_encoder_spec(logn)


def test_mpnet_adds_a_bias_for_each_distance(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    folder = tmp_path / "mpnet"
    model = save_encoder(folder, "mpnet", **PADDED)
    spec, checkpoint = read_encoder_spec(folder), open_checkpoint(folder)
    assert (spec.max_tokens, spec.first_position, spec.token_types) == (512, 2, 0)
    bias, places = encoder_tables(spec, checkpoint)["bias"], np.arange(512)
    assert bias.shape == spec.tables["bias"]
    wanted = model.encoder.compute_position_bias(torch.empty(1, 512))[0].detach().numpy()
    np.testing.assert_array_equal(bias[:, spec.span + places[:, None] - places], wanted)
    for key, value in (("relative_attention_num_buckets", 16), ("pad_token_id", 0)):
        with pytest.raises(SpecError, match=key):
            read_encoder_spec(copy(folder, tmp_path / key, **{key: value}))
    torch.nn.init.constant_(model.encoder.relative_attention_bias.weight, torch.nan)
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(SpecError, match="relative_attention_bias"):
        encoder_tables(spec, open_checkpoint(tmp_path / "nan"))


def test_nomic_may_be_told_in_the_words_of_its_authors(nomic: Path, tmp_path: Path) -> None:
    spec = read_encoder_spec(nomic)
    assert (spec.activation, spec.gated, spec.norm_first) == ("silu", True, False)
    assert spec.rope and spec.rope.theta == 1000.0
    told = copy(nomic, tmp_path / "nomic-embed-text-v1.5")
    write_nomic_words(told)
    found = read_encoder_spec(told)
    assert found.prompts["search_query"] == "search_query: "
    assert replace(found, prompts={}) == spec
    scaled = copy(nomic, tmp_path / "scaled")
    write_nomic_words(scaled, rotary_scaling_factor=2, max_trained_positions=256)
    assert read_encoder_spec(scaled).max_tokens == 256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 8, "qkv_proj_bias": True}, "num_experts is 8, but of nomic models only 0"),
        ({"mlp_fc1_bias": True}, "mlp_fc1_bias"),
        ({"prenorm": True}, "prenorm"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        ({"activation_function": "gelu"}, 'activation_function is "gelu", but must be one of silu'),
        ({"n_embd": 63}, "n_embd is 63"),
        ({"n_inner": 60}, "mlp.fc12.weight has shape"),
    ],
)
def test_what_nomic_may_not_be(
    nomic: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = copy(nomic, tmp_path / "m")
    write_nomic_words(folder, **changes)
    with pytest.raises(SpecError, match=words):
        read_encoder_spec(folder)


@pytest.mark.parametrize(
    ("file", "value", "words"),
    [
        ("modules.json", {}, "must be a list"),
        ("modules.json", [{"type": "x.CNN", "path": "2_CNN"}], "modules CNN are not supported"),
        ("modules.json", [{"type": f"x.{k}", "path": ""} for k in BACKWARDS], "in this order"),
        ("modules.json", [{"type": "x.Transformer", "path": ""}] * 2, "first two at most once"),
        (
            "modules.json",
            [{"type": "x.Dense", "path": "2_Dense"}],
            "2_Dense has neither",
        ),
        ("modules.json", [{"type": "x.Pooling", "path": "../.."}], "leads out"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "not supported"),
        ("1_Pooling/config.json", {}, "pooling by nothing"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "none of the prompts"),
        ("config_sentence_transformers.json", {"prompts": {"q": 5}}, "string is needed"),
        ("sentence_bert_config.json", {"max_seq_length": 1}, "max_seq_length"),
    ],
)
def test_faulty_modules_are_refused(
    bert: Path, tmp_path: Path, file: str, value: object, words: str
) -> None:
    folder = copy(bert, tmp_path / "m")
    write_modules(folder, {"pooling_mode_mean_tokens": True})
    write(folder / file, value)
    with pytest.raises(SpecError, match=words):
        read_encoder_spec(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_function": "torch.nn.modules.activation.GELU"}, "Identity and Tanh"),
        ({"in_features": 63}, "in_features is 63"),
        ({"out_features": 30}, "dense.0.linear.weight has shape"),
        ({"bias": False}, "dense.0.linear.bias is not part"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_faulty_dense_layers_are_refused(
    bert: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = copy(bert, tmp_path / "m")
    layers = [Dense(32, 64, bias=True)]
    write_modules(folder, {"pooling_mode_mean_tokens": True}, unit=False, dense=layers)
    assert read_encoder_spec(folder).dim == 32
    file = folder / "2_Dense/config.json"
    write(file, json.loads(file.read_text()) | changes)
    with pytest.raises(SpecError, match=words):
        read_encoder_spec(folder)


def test_a_decoder_is_an_encoder_where_modules_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_decoder(folder, "qwen3", architecture="Qwen3ForCausalLM")
    assert is_encoder(folder)
    spec = read_encoder_spec(folder)
    assert (spec.family, spec.pooling, spec.unit, spec.causal) == ("qwen3", "last", True, True)
    (folder / "modules.json").unlink()
    assert not is_encoder(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {}}, "quantization_config says ''"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"is_causal": False}, "sliding_window is 24"),
        ({"sliding_window": 1}, "sliding_window is 1"),
        ({"num_hidden_layers": 1}, "layers.1.* is not part"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"use_bidirectional_attention": True}, "only false is supported"),
    ],
)
def test_what_embedding_decoders_may_not_be(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save_decoder(tmp_path / "m", "mistral", sliding_window=24)
    file = tmp_path / "m/config.json"
    write(file, json.loads(file.read_text()) | changes)
    with pytest.raises(SpecError, match=words):
        read_encoder_spec(tmp_path / "m")


def test_slopes_of_alibi() -> None:
    np.testing.assert_allclose(alibi_slopes(8)[:, 0], 2.0 ** -np.arange(1, 9))
    twelve = [*(2.0 ** -np.arange(1, 9)), *(2.0 ** -np.array([0.5, 1.5, 2.5, 3.5]))]
    np.testing.assert_allclose(alibi_slopes(12)[:, 0], twelve, rtol=1e-6)
