"""The configuration in GGUF files: equal to that of the directory, or refused in one sentence."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

from dovetail.compiler.families.rope import inverse_frequencies, rope_tables
from dovetail.compiler.models.spec import read_dimensions, read_model_spec
from dovetail.ir.errors import SpecError
from tests.gguf_files import save_gguf
from tests.models import EXPERTS, FAMILIES, UNGATED, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def both(tmp_path, family, change=None, **options):
    """Return the specs of a saved model and of its GGUF file, stop tokens apart."""
    folder = save_model(tmp_path / "m", family, **options)
    path = save_gguf(tmp_path / "m.gguf", folder, change=change)
    ours, wanted = read_model_spec(path), read_model_spec(folder)
    return replace(ours, eos_token_ids=(), bos_token_id=None), replace(
        wanted, eos_token_ids=(), bos_token_id=None
    )


SAME_AS = {"granite4": "granite", "granite4_moe": "granitemoe", "granitemoeshared": "granitemoe"}
"""Families whose files name another that computes the same."""


@pytest.mark.parametrize("family", [*FAMILIES, *UNGATED, *EXPERTS])
@pytest.mark.parametrize("options", [{}, {"head_dim": 32, "rms_norm_eps": 1e-5}])
def test_families(family, options, tmp_path):
    window = {"sliding_window": None} if family == "mistral" else {}
    if family == "olmoe":  # its code takes heads that are as wide as the stream together
        options = {}
    ours, wanted = both(tmp_path, family, **options, **window)
    if family == "mistral":  # the file says llama, which computes the same without a window
        assert ours.family == "llama"
        ours = replace(ours, family="mistral")
    if family in SAME_AS:
        assert ours.family == SAME_AS[family]
        ours = replace(ours, family=wanted.family)
    if family in ("gemma2", "gemma3"):  # whose files have norms as they multiply
        assert (ours.norm_offset, wanted.norm_offset) == (0.0, 1.0)
        ours = replace(ours, norm_offset=1.0)
    assert ours == wanted


def test_layers_that_draft_tokens_are_left_out(tmp_path):
    def tell(writer):
        writer.add_nextn_predict_layers(1)

    ours, _ = both(tmp_path, "glm4_moe", change=tell)
    assert (ours.n_layers, ours.experts.dense_layers) == (2, (True, False))


def test_the_ropes_of_olmo_3(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {**yarn, "rope_theta": 5000.0},
    }
    ours, wanted = both(tmp_path, "olmo3", rope_parameters=ropes, num_hidden_layers=5)
    assert ours == wanted and ours.local_rope.theta == ours.rope.theta == 5000.0
    assert [bool(ours.layer_window(i)) for i in range(5)] == [True, True, True, False, True]
    old = tmp_path / "m" / "config.json"
    config = json.loads(old.read_text())
    del config["rope_parameters"]
    old.write_text(json.dumps(config | {"rope_theta": 5000.0, "rope_scaling": yarn}))
    read = read_model_spec(tmp_path / "m")
    assert (read.rope, read.local_rope) == (wanted.rope, wanted.local_rope)


def test_gemmas_ropes_and_layers(tmp_path):
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    ours, wanted = both(tmp_path, "gemma3", num_hidden_layers=13, rope_parameters=ropes)
    assert replace(ours, norm_offset=1.0) == wanted
    assert [i for i in range(13) if not ours.layer_window(i)] == [5, 11]
    assert ours.rope.factor == 8.0 and ours.local_rope.theta == 10000.0


def test_a_rope_on_some_layers(tmp_path):
    ours, wanted = both(tmp_path, "smollm3", num_hidden_layers=9)
    assert ours == wanted
    assert [i for i in range(9) if not ours.layer_rope(i)[1]] == [3, 7]


@pytest.mark.parametrize("context", [64, 65])
def test_divisors_of_phi_3(context, tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + i for i in range(6)],
        "long_factor": [2.0 + i for i in range(6)],
    }
    options = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    folder = save_model(tmp_path / "m", "phi3", **options)
    path = save_gguf(tmp_path / "m.gguf", folder)
    ours, wanted = (read_model_spec(m, max_context=context).rope for m in (path, folder))
    assert ours == wanted and ours.rotary_dim == 12
    assert ours.divisors[0] == (1.0 if context == 64 else 2.0)


def test_a_rope_of_a_part_of_each_head(tmp_path):
    """Phi-3's files may tell it without divisors; a factor without a place is refused."""
    ours, _ = both(tmp_path, "phi3", lambda w: w.add_rope_dimension_count(12))
    assert (ours.rope.kind, ours.rope.rotary_dim) == ("default", 12)
    with pytest.raises(SpecError, match=r"attn_factor is 1\.5"):
        both(tmp_path / "other", "phi3", lambda w: w.add_rope_scaling_attn_factors(1.5))


def test_a_list_of_divisors_that_is_missing_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"rope_factors_short\.weight is no vector of 8 values"):
        both(
            tmp_path,
            "phi3",
            lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)),
        )


def test_biases(tmp_path):
    ours, wanted = both(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert ours == wanted and ours.mlp_bias and ours.output_bias


def test_mistrals_window(tmp_path):
    ours, wanted = both(
        tmp_path, "mistral", lambda w: w.add_sliding_window(100), sliding_window=100
    )
    assert ours == wanted and ours.sliding_window == 100


def test_a_window_on_some_layers_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"attention\.sliding_window is 100, but it is not told"):
        both(tmp_path, "qwen2", lambda w: w.add_sliding_window(100))


def test_a_window_as_long_as_the_context_is_none(tmp_path):
    ours, _ = both(tmp_path, "qwen2", lambda w: w.add_sliding_window(512))
    assert ours.sliding_window == 0


def add_factors(writer, rope, head_dim=16, change=1.0):
    """Write the divisors of a Llama 3's frequencies, as its converter computes them."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    plain = 1.0 / rope["rope_theta"] ** exponents
    wave = 2 * np.pi / plain
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / wave - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / factor + smooth)
    writer.add_tensor("rope_freqs.weight", (factors * change).astype(np.float32))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_llama_3(factor, tmp_path):
    rope = LLAMA3 | {"factor": factor}
    ours, wanted = both(
        tmp_path, "llama", lambda w: add_factors(w, rope, 64), head_dim=64, rope_parameters=rope
    )
    assert ours == wanted
    np.testing.assert_array_equal(rope_tables(ours.rope, 9), rope_tables(wanted.rope, 9))


def test_divisors_of_one_change_nothing(tmp_path):
    ones = np.ones(8, np.float32)
    ours, wanted = both(tmp_path, "llama", lambda w: w.add_tensor("rope_freqs.weight", ones))
    assert ours == wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.linspace(1, 9, 8), "are not those of Llama 3"),
        (np.ones(4), "no vector of 8 values"),
        (np.full(8, np.nan), "no divisors"),
        (np.zeros(8), "no divisors"),
    ],
)
def test_other_divisors_are_refused(values, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        both(
            tmp_path,
            "llama",
            lambda w: w.add_tensor("rope_freqs.weight", values.astype(np.float32)),
        )


@pytest.mark.parametrize(
    ("kind", "key"),
    [("LINEAR", "scaling.factor"), (None, "scaling.factor"), (None, "scale_linear")],
)
def test_linear_scaling(kind, key, tmp_path):
    """As in llama.cpp it is what a factor stands for where no kind is told."""
    import gguf

    def change(writer):
        if kind:
            writer.add_rope_scaling_type(gguf.RopeScalingType[kind])
        writer.add_float32(f"llama.rope.{key}", 4.0)

    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ours, wanted = both(tmp_path, "llama", change, rope_parameters=rope)
    assert ours == wanted


def test_yarn(tmp_path):
    import gguf

    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(512)

    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e6,
        "original_max_position_embeddings": 512,
    }
    ours, wanted = both(tmp_path, "qwen2", change, rope_parameters=rope)
    assert ours == wanted
    np.testing.assert_array_equal(inverse_frequencies(ours.rope), inverse_frequencies(wanted.rope))


CHANGES = {
    "tokens for a token": (
        lambda w: w.add_array("tokenizer.ggml.bos_token_id", [1, 2]),
        "bos_token_id is .*but an integer is needed",
    ),
    "shared experts": (lambda w: w.add_expert_shared_count(1), r"expert_shared_count is 1, but"),
    "long rope": (
        lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
        r"scaling\.type is .longrope., but supported are none, linear, yarn",
    ),
    "part of a head": (
        lambda w: w.add_rope_dimension_count(8),
        r"rope\.dimension_count is 8, but only the 16 values",
    ),
    "layers that differ": (
        lambda w: w.add_array("llama.feed_forward_length_of", [1, 2]),
        r"differs between layers",
    ),
    "both ways": (lambda w: w.add_causal_attention(False), r"attention\.causal is false"),
    "another logit": (lambda w: w.add_logit_scale(0.5), r"logit_scale is 0\.5, but this is not"),
    "a text for a number": (
        lambda w: w.add_string("llama.attention.value_length", "16"),
        "value_length is .*an integer is needed",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_is_not_computed_is_refused(change, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        both(tmp_path, "llama", change)


def test_other_architectures_are_named(tmp_path):
    folder = save_model(tmp_path / "m", "llama")

    def change(writer):
        writer.kv_data[0]["general.architecture"].value = "bloom"

    path = save_gguf(tmp_path / "m.gguf", folder, change=change)
    with pytest.raises(SpecError, match="'bloom' is not supported; supported: llama, mistral3, "):
        read_model_spec(path)


def test_a_vocabulary_of_another_size(tmp_path):
    folder = save_model(tmp_path / "m", "llama")
    path = save_gguf(tmp_path / "m.gguf", folder, tokenizer=lambda w: w.add_token_list(["a"] * 99))
    with pytest.raises(SpecError, match="99 tokens, but an embedding of 100 rows"):
        read_model_spec(path)


def test_dimensions_have_the_formats_of_the_file(tmp_path):
    folder = save_model(tmp_path / "m", "llama", intermediate_size=128)
    path = save_gguf(tmp_path / "m.gguf", folder, "Q8_0")
    assert read_dimensions(path) == read_model_spec(path)
    assert read_dimensions(folder).hidden_size == read_dimensions(path).hidden_size == 64
