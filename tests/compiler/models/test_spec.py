"""ModelSpec from directories that transformers wrote, and from directories that are wrong."""

import json
import math

import pytest
from safetensors.numpy import load_file, save_file

from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_dimensions, read_generation_defaults, read_model_spec
from dovetail.ir.errors import SpecError
from tests.models import FAMILIES, OWN, SMALL, UNGATED, save_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("spec") / "llama", "llama")


def edited(source, target, drop=(), **values):
    """Copy a model directory with other config values (weights linked)."""
    target.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (target / file.name).hardlink_to(file)
    config = json.loads((source / "config.json").read_text())
    config = {k: v for k, v in {**config, **values}.items() if k not in drop}
    (target / "config.json").write_text(json.dumps(config))
    return target


NORMED = ("apertus", "qwen3", "gemma3", "olmo2", "olmo3", "exaone4", "hunyuan")
"""Families that norm queries and keys."""


@pytest.mark.parametrize("family", [*FAMILIES, *UNGATED])
@pytest.mark.parametrize("tied", [False, True])
def test_every_family(family, tied, tmp_path):
    path = save_model(tmp_path / "m", family, tie_word_embeddings=tied)
    spec = read_model_spec(path)
    assert (spec.family, spec.tied_head) == (family, tied)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (100, 64, 120)
    head_dim = OWN.get(family, {}).get("head_dim", 16)
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (2, 4, 2, head_dim)
    assert (spec.max_position, spec.max_context, spec.norm_eps) == (512, 512, 1e-6)
    assert spec.attention_bias == (family in ("qwen2", "glm4", "seed_oss"))
    assert spec.qk_norm == (family in NORMED)
    assert not (spec.output_bias or spec.mlp_bias)
    assert (spec.weight_dtype, spec.checkpoint_dtype, spec.kv_dtype) == ("f32", "f32", "f32")
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    same_without(path, "layer_norm_eps" if spec.layer_norm else "rms_norm_eps")


def same_without(path, *keys):
    """Drop keys; what they stand for then is what transformers says."""
    transformers = pytest.importorskip("transformers")
    short = edited(path, path.parent / "-".join(keys), keys)
    told = transformers.AutoConfig.from_pretrained(short).to_dict()
    read = read_dimensions(edited(short, path.parent / "-".join(("told", *keys)), **told))
    assert read_dimensions(short) == read


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gpt_oss", ("rms_norm_eps", "sliding_window")),
        ("dots1", ("sliding_window",)),
        ("exaone4", ("sliding_window",)),
        ("mistral", ("sliding_window",)),
        ("gemma2", ("sliding_window",)),
        ("mixtral", ("rms_norm_eps",)),
        ("nemotron_h", ("layer_norm_epsilon",)),
        ("falcon_h1", ("rms_norm_eps",)),
        ("glm4_lite", ("rms_norm_eps", "routed_scaling_factor")),
        ("deepseek3", ("routed_scaling_factor",)),
        ("cohere", ("rope_parameters",)),
    ],
)
def test_absent_keys_stand_for_what_a_family_has(family, keys, tmp_path):
    same_without(save_model(tmp_path / "m", family), *keys)


def test_the_first_context_of_phi_3_is_not_its_ropes(tmp_path):
    rope = {**DIVISORS, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
    rope = {**rope, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 8192}
    path = save_model(tmp_path / "m", "phi3", max_position_embeddings=8192)
    path = edited(path, tmp_path / "e", rope_parameters=rope)
    same_without(path, "original_max_position_embeddings")


@pytest.mark.parametrize("family", ["gpt_oss", "apertus", "ministral3"])
def test_a_rope_that_is_always_scaled_must_be_told(family, tmp_path):
    path = edited(save_model(tmp_path / "m", family), tmp_path / "e", ("rope_parameters",))
    with pytest.raises(SpecError, match="has no rope_parameters"):
        read_model_spec(path)


def test_a_scan_of_other_sizes_than_its_tensors_is_refused(tmp_path):
    path = edited(save_model(tmp_path / "m", "falcon_h1"), tmp_path / "e", mamba_d_state=48)
    with pytest.raises(SpecError, match=r"mamba.in_proj.weight has shape"):
        read_model_spec(path)


def test_layers_of_gemma_4_may_be_numbered_with_zeros_before(tmp_path):
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    own = {"num_hidden_layers": 12, "layer_types": kinds, "num_kv_shared_layers": 0}
    path = save_model(tmp_path / "m", "gemma4", **own)
    padded = {"05": {"head_dim": 32}, "11": {"head_dim": 32}}
    plain = {str(int(layer)): heads for layer, heads in padded.items()}
    specs = [
        read_model_spec(edited(path, tmp_path / name, per_layer_config=told))
        for name, told in (("a", padded), ("b", plain))
    ]
    assert specs[0] == specs[1] and specs[0].layer_heads(5)[2] == 32


@pytest.mark.parametrize(
    ("values", "drop", "caps", "windows"),
    [
        ({}, (), (1, 3.0), 24),
        ({}, ("attn_logit_softcapping", "final_logit_softcapping"), (50, 30.0), 24),
        (dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping")), (), (0, 0.0), 24),
        ({}, ("sliding_window", "layer_types"), (1, 3.0), 4096),
    ],
)
def test_caps_and_windows_of_gemma_2(values, drop, caps, windows, tmp_path):
    path = save_model(tmp_path / "m", "gemma2", num_hidden_layers=3)
    spec = read_model_spec(edited(path, tmp_path / "e", drop, **values))
    assert (spec.attention_cap, spec.logits_cap) == caps
    assert [spec.layer_window(i) for i in range(3)] == [windows, 0, windows]
    assert spec.attention_scale == 32**-0.5


def test_a_head_that_is_stored_and_another_is_not_the_embedding(llama, tmp_path):
    path = edited(llama, tmp_path / "m", tie_word_embeddings=True)
    assert not read_model_spec(path).tied_head
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    file.unlink()  # it is linked
    save_file(tensors, file)
    assert read_model_spec(path).tied_head


def test_llama_biases_and_head_dim(tmp_path):
    path = save_model(tmp_path / "m", "llama", attention_bias=True, mlp_bias=True, head_dim=32)
    spec = read_model_spec(path)
    assert spec.attention_bias and spec.output_bias and spec.mlp_bias
    assert (spec.head_dim, spec.qkv_size) == (32, 8 * 32)


@pytest.mark.parametrize(
    ("dtype", "stored", "packed"),
    [("bfloat16", "bf16", "bf16"), ("float16", "f16", "f32"), ("float32", "f32", "f32")],
)
def test_dtypes(dtype, stored, packed, tmp_path):
    path = save_model(tmp_path / "m", "llama", dtype=dtype)
    spec = read_model_spec(path)
    assert (spec.checkpoint_dtype, spec.weight_dtype) == (stored, packed)
    assert read_model_spec(path, weight_dtype="bf16", kv_dtype="f16").weight_dtype == "bf16"


def test_sliding_windows(tmp_path):
    mistral = read_model_spec(save_model(tmp_path / "a", "mistral", sliding_window=32))
    assert [mistral.layer_window(i) for i in range(2)] == [32, 32]
    full = read_model_spec(save_model(tmp_path / "b", "mistral", sliding_window=None))
    assert full.layer_window(0) == 0
    qwen = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    path = save_model(tmp_path / "c", "qwen2", **qwen)
    assert [read_model_spec(path).layer_window(i) for i in range(2)] == [0, 32]
    older = edited(path, tmp_path / "d", drop=("layer_types",))
    assert read_model_spec(older) == read_model_spec(path)
    off = edited(path, tmp_path / "e", use_sliding_window=False)
    assert read_model_spec(off).layer_window(1) == 0


def test_a_window_of_qwens_mixtures_is_of_all_layers(tmp_path):
    path = save_model(tmp_path / "m", "qwen3_moe", use_sliding_window=True, sliding_window=32)
    mixture = edited(path, tmp_path / "a", max_window_layers=1)  # their code has no such key
    assert [read_model_spec(mixture).layer_window(i) for i in range(2)] == [32, 32]
    off = edited(path, tmp_path / "b", use_sliding_window=False)
    assert read_model_spec(off).layer_window(0) == 0


@pytest.mark.parametrize(("family", "kv_heads"), [("qwen3_moe", 4), ("mixtral", 8)])
def test_mixtures_that_tell_no_kv_heads_have_those_of_their_code(family, kv_heads, tmp_path):
    path = save_model(tmp_path / "m", family, num_attention_heads=8, head_dim=16)
    older = edited(path, tmp_path / "a", drop=("num_key_value_heads",))
    assert read_dimensions(older / "config.json").n_kv_heads == kv_heads


def test_older_rope_keys_mean_the_same(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = save_model(tmp_path / "new", "llama", rope_parameters={**scaling, "rope_theta": 5e5})
    assert "rope_parameters" in json.loads((new / "config.json").read_text())
    old = edited(
        new, tmp_path / "old", drop=("rope_parameters",), rope_theta=5e5, rope_scaling=scaling
    )
    spec = read_model_spec(new)
    assert read_model_spec(old) == spec
    assert (spec.rope.kind, spec.rope.theta, spec.rope.factor) == ("llama3", 5e5, 8.0)
    both = edited(new, tmp_path / "both", rope_theta=5e5, rope_scaling=scaling)
    assert read_model_spec(both) == spec
    for i, wrong in enumerate(
        (
            {"rope_theta": 5e5, "rope_scaling": {**scaling, "factor": 4.0}},
            {"rope_theta": 5e5, "rope_scaling": {"factor": 8.0}},  # whose kind is `default`
            {"rope_scaling": scaling},  # whose base is 10000
        )
    ):
        with pytest.raises(SpecError, match="rope_parameters is there, too"):
            read_model_spec(edited(new, tmp_path / f"split{i}", **wrong))


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_first_context_may_be_told_beside_the_rope(kind, tmp_path):
    rope = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**rope, "original_max_position_embeddings": 64, "mscale_all_dim": 0.0, "mscale": 1.0}
    path = save_model(tmp_path / "a", "llama", rope_parameters={**rope, "rope_theta": 5e5})
    wanted = read_model_spec(path)
    assert wanted.rope.original_max_position == 64
    del rope["original_max_position_embeddings"]
    apart = {"rope_parameters": rope, "original_max_position_embeddings": 64, "rope_theta": 5e5}
    assert read_model_spec(edited(path, tmp_path / "b", **apart)) == wanted


def test_yarn_stretches_the_context(tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    spec = read_model_spec(save_model(tmp_path / "m", "qwen2", rope_parameters=rope))
    assert spec.max_position == 2048
    assert spec.rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_generation_config_wins_and_is_kept(llama, tmp_path):
    path = edited(llama, tmp_path / "m")
    (path / "generation_config.json").unlink()
    (path / "generation_config.json").write_text(
        '{"eos_token_id": [7, 9, 7, 100], "temperature": 0.6, "top_p": 0.9, "bad": NaN, "n": null}'
    )
    assert read_model_spec(path).eos_token_ids == (7, 9)  # it has 100 rows
    kept = {"eos_token_id": [7, 9, 7, 100], "temperature": 0.6, "top_p": 0.9}
    assert read_generation_defaults(open_model(path)) == kept


@pytest.mark.parametrize(
    ("token", "ends"),
    [
        ("<|im_end|>", (2, 7)),
        ({"content": "<|im_end|>"}, (2, 7)),
        ("<s>", (2,)),  # the model has no such row
        (5, (2,)),
        (None, (2,)),
    ],
)
def test_the_tokenizers_end_is_a_stop_token_too(token, ends, llama, tmp_path):
    """Models that were tuned to other turns keep the config.json of the one they came from."""
    path = edited(llama, tmp_path / "m")
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 100, "content": "<s>"}, {"content": 5}, 3]
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert read_model_spec(path).eos_token_ids == ends


def test_context_limit(llama):
    assert read_model_spec(llama, max_context=100).max_context == 100
    with pytest.raises(SpecError, match="512"):
        read_model_spec(llama, max_context=513)


BAD_VALUES = [
    ("architectures", ["GPT2LMHeadModel"], "GPT2LM.*LlamaForCausalLM.*as encoders: BertModel"),
    ("architectures", [], "none.*Qwen3ForCausalLM"),
    ("architectures", 3, "architectures"),
    ("rms_norm_eps", math.nan, "rms_norm_eps is nan"),
    ("rms_norm_eps", -1.0, "rms_norm_eps"),
    ("hidden_size", math.nan, "hidden_size is nan"),
    ("hidden_size", math.inf, "hidden_size"),
    ("hidden_size", -64, "hidden_size is -64"),
    ("hidden_size", "64", 'hidden_size is "64"'),
    ("hidden_size", 1 << 60, "hidden_size"),
    ("hidden_size", 66, "model.embed_tokens.weight|hidden_size"),
    ("num_hidden_layers", 0, "num_hidden_layers"),
    ("num_hidden_layers", 10**9, "num_hidden_layers"),
    ("num_hidden_layers", 1, "model.layers.1"),
    ("num_hidden_layers", 3, "model.layers.2"),
    ("num_attention_heads", True, "num_attention_heads"),
    ("num_key_value_heads", 3, "num_key_value_heads"),
    ("num_key_value_heads", 8, "num_key_value_heads"),
    ("head_dim", 24, "head_dim 24"),
    ("head_dim", 592, "head_dim 592"),
    ("intermediate_size", 128, "mlp.gate_proj.weight has shape .120, 64."),
    ("vocab_size", 101, r"embed_tokens.weight has shape \[100, 64\].*\[101, 64\]"),
    ("vocab_size", None, "vocab_size"),
    ("hidden_act", "gelu", "gelu"),
    ("max_position_embeddings", 1e30, "max_position_embeddings"),
    ("tie_word_embeddings", "yes", "tie_word_embeddings"),
    ("attention_bias", True, "q_proj.bias"),
    ("quantization_config", {"bits": 4}, "quant"),
    ("rope_parameters", {"rope_type": "longrope"}, "short_factor is null"),
    ("rope_parameters", {"rope_type": "linear", "factor": math.nan}, "factor is nan"),
    ("rope_parameters", {"rope_theta": -3.0}, "rope_theta"),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}, "layer types"),
    ("rope_parameters", [1], "rope_parameters"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
    ("eos_token_id", "two", "eos_token_id"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_VALUES)
def test_bad_config_values(key, value, message, llama, tmp_path):
    path = edited(llama, tmp_path / "m", **{key: value})
    if key == "eos_token_id":
        (path / "generation_config.json").unlink()
    with pytest.raises(SpecError, match=message):
        read_model_spec(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"a": "\ud800'])
def test_config_that_is_no_json_object(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SpecError, match=r"config\.json"):
        read_model_spec(tmp_path)


def test_missing_directory_and_config(tmp_path):
    with pytest.raises(SpecError, match="neither a Hugging Face model directory nor a GGUF file"):
        read_model_spec(tmp_path / "none")
    with pytest.raises(SpecError, match=r"config\.json is missing"):
        read_model_spec(tmp_path)


def test_small_config_is_what_transformers_wrote(llama):
    written = json.loads((llama / "config.json").read_text())
    assert {k: written[k] for k in SMALL} == SMALL


@pytest.mark.parametrize(
    ("architecture", "kind", "wanted"),
    [
        ("Mistral3ForConditionalGeneration", "mistral", "mistral"),
        ("Mistral3ForConditionalGeneration", "ministral3", "ministral3"),
        ("Gemma3ForConditionalGeneration", "gemma3_text", "gemma3"),
    ],
)
def test_the_text_part_of_a_model_of_pictures(architecture, kind, wanted, tmp_path):
    folder = save_model(tmp_path / "m", wanted)
    config = json.loads((folder / "config.json").read_text())
    stored = config.pop("dtype", "float32")
    whole = {"architectures": [architecture], "eos_token_id": [2, 7], "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "generation_config.json").unlink()
    spec = read_model_spec(folder)
    assert (spec.family, spec.eos_token_ids) == (wanted, (2, 7))
    for dtype, short in ((stored, "f32"), ("bfloat16", "bf16")):
        (folder / "config.json").write_text(json.dumps(whole | {"dtype": dtype}))
        assert read_dimensions(folder / "config.json").checkpoint_dtype == short
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": {"bits": 4}}))
    with pytest.raises(SpecError, match="quantization_config"):
        read_model_spec(folder)
    whole["text_config"] = config | {"model_type": "other"}
    (folder / "config.json").write_text(json.dumps(whole))
    with pytest.raises(SpecError, match=f"model_type 'other' is not supported, only .*{kind}"):
        read_model_spec(folder)


def test_ministral_is_used_up_to_its_original_context(tmp_path):
    """Scores of later positions would be scaled."""
    rope = OWN["ministral3"]["rope_parameters"] | {"original_max_position_embeddings": 128}
    folder = save_model(tmp_path / "m", "ministral3", rope_parameters=rope)
    assert read_model_spec(folder).max_position == 128
    rope["llama_4_scaling_beta"] = 0.0
    folder = save_model(tmp_path / "n", "ministral3", rope_parameters=rope)
    assert read_model_spec(folder).max_position == 16 * 128
    with pytest.raises(SpecError, match="allows 1 to 128"):
        read_model_spec(tmp_path / "m", max_context=129)


DIVISORS = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
BAD_OF_FAMILIES = [
    ("smollm3", "no_rope_layers", [1], "no_rope_layers"),
    ("smollm3", "no_rope_layers", [1, [0]], "no_rope_layers"),
    ("smollm3", "use_sliding_window", "yes", "use_sliding_window"),
    ("gemma2", "attn_logit_softcapping", 2.5, "only whole numbers up to 1024"),
    ("gemma2", "attn_logit_softcapping", 2000, "only whole numbers up to 1024"),
    ("gemma3", "attn_logit_softcapping", 50.0, "only null"),
    ("apertus", "hidden_act", "silu", "only xielu"),
    ("apertus", "post_norm", True, "only False"),
    ("gemma3", "hidden_activation", "silu", "only gelu_pytorch_tanh"),
    ("gemma3", "layer_types", ["full_attention"], "layer_types"),
    ("gemma3", "rope_parameters", {"rope_type": "default"}, "full_attention|sliding_attention"),
    ("gemma3", "final_logit_softcapping", 30.0, "only null"),
    ("gemma3", "query_pre_attn_scalar", 0, "query_pre_attn_scalar"),
    ("granite", "embedding_multiplier", 0.0, "embedding_multiplier"),
    ("qwen3_moe", "mlp_only_layers", [1], "layers.1.mlp.gate_proj"),
    ("qwen3_moe", "mlp_only_layers", [True], "a list of layers"),
    ("qwen3_moe", "decoder_sparse_step", 2, "layers.0.mlp.gate_proj"),
    ("glm4_moe", "first_k_dense_replace", 0, "layers.0.mlp.gate.weight"),
    ("glm4_moe", "n_group", 3, "into equal groups"),
    ("glm4_moe", "topk_group", 2, "topk_group"),
    ("glm4_moe", "n_shared_experts", 1, "has shape .96, 64., .* asks for .48, 64."),
    ("glm4_moe", "num_hidden_layers", 1, "layers.2.* is not part"),
    ("ernie4_5_moe", "moe_norm_min", 0.1, "only 1e-12"),
    ("ernie4_5_moe", "use_bias", True, "only False"),
    ("qwen2_moe", "qkv_bias", False, "only True"),
    ("qwen2_moe", "shared_expert_intermediate_size", 0, "is not part of this architecture"),
    ("qwen3_moe", "moe_intermediate_size", 40, "multiples of 16"),
    ("gpt_oss", "swiglu_limit", 5.0, "only 7.0 is supported"),
    ("gpt_oss", "swiglu_alpha", 1.0, "only 1.702 is supported"),
    ("gpt_oss", "intermediate_size", 32, "tensor .*gate_proj.weight has shape .48, 64."),
    ("granite4", "layer_types", ["conv", "attention"], "must name full_attention or linear"),
    ("granite4", "num_local_experts", 8, "experts of 64 x 120"),
    ("mixtral", "num_experts_per_tok", 6, "num_experts_per_tok"),
    ("mixtral", "num_local_experts", 4, "asks for .4, 64"),
    ("phi3", "original_max_position_embeddings", 1, "original_max_position_embeddings"),
    ("phi3", "rope_parameters", DIVISORS | {"long_factor": [math.nan] * 8}, "long_factor"),
    ("phi3", "rope_parameters", DIVISORS | {"partial_rotary_factor": 0.1}, "turns 1 of the 16"),
]


@pytest.mark.parametrize(("family", "key", "value", "message"), BAD_OF_FAMILIES)
def test_bad_values_of_some_families(family, key, value, message, tmp_path):
    folder = save_model(tmp_path / "m", family)
    config = json.loads((folder / "config.json").read_text())
    if family == "phi3":
        config |= {"original_max_position_embeddings": 64, "rope_parameters": DIVISORS}
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(SpecError, match=message):
        read_model_spec(folder)
