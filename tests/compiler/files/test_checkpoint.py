"""The safetensors reader against the library's own files, and against files that lie."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.files.checkpoint import open_checkpoint, read_header
from dovetail.ir.errors import SpecError
from tests.models import make_model, save_model


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_values_are_the_models(dtype, shard, tmp_path):
    torch = pytest.importorskip("torch")

    path = save_model(tmp_path / "m", "llama", dtype=dtype, shard=shard)
    assert (path / "model.safetensors.index.json").exists() == (shard == "40KB")
    checkpoint = open_checkpoint(path)
    wanted = make_model("llama", dtype=dtype).state_dict()
    assert set(checkpoint.tensors) == set(wanted)
    for name, tensor in wanted.items():
        bits = tensor.view(torch.uint16) if dtype == "bfloat16" else tensor
        got = checkpoint.load(name)
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, bits.numpy())


def test_unaligned_header_and_empty_tensor(tmp_path):
    header = {"a": entry([2], 0, 8), "none": entry([0, 3], 8, 8)}
    text = json.dumps(header).encode() + b" "
    text += b" " * (3 - len(text) % 4)  # the data starts at an odd offset
    write_raw(tmp_path / "model.safetensors", text, np.array([1, 2], "<f4").tobytes())
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.load("a"), np.array([1, 2], "<f4"))
    assert checkpoint.load("none").shape == (0, 3)


BAD_HEADERS = {
    "length past the end": ({}, b"", 1 << 40, "truncated"),
    "length zero": (b"", b"", None, "not valid JSON"),
    "no json": (b"{nope", b"", None, "not valid JSON"),
    "a list": ([1], b"", None, "JSON object"),
    "entry is no object": ({"a": 3}, b"", None, "tensor a needs dtype"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, b"", None, "tensor a needs"),
    "unknown dtype": ({"a": entry([1], 0, 1, "F8_E5M2")}, b"1", None, "tensor a.*F8_E5M2"),
    "dtype is a list": ({"a": entry([1], 0, 1, ["F32"])}, b"1", None, "tensor a"),
    "negative shape": ({"a": entry([-1], 0, 4)}, b"1234", None, "tensor a.*shape"),
    "boolean shape": ({"a": entry([True], 0, 4)}, b"1234", None, "tensor a.*shape"),
    "huge shape": ({"a": entry([1 << 40, 1 << 40], 0, 4)}, b"1234", None, "tensor a.*bytes"),
    "many dims": ({"a": entry([1] * 99, 0, 4)}, b"1234", None, "tensor a.*shape"),
    "offsets reversed": ({"a": entry([1], 4, 0)}, b"1234", None, "tensor a.*offsets"),
    "offsets not two": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        b"12345678",
        None,
        "tensor a.*offsets",
    ),
    "size and shape differ": ({"a": entry([3], 0, 4)}, b"1234", None, "tensor a.*needs 12"),
    "past the end": ({"a": entry([2], 0, 8)}, b"1234", None, "truncated: tensor a"),
    "overlap": ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"12345678", None, "tensor b over"),
    "hole": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"1" * 12, None, "tensor b.*hole"),
    "bytes left over": ({"a": entry([1], 0, 4)}, b"1" * 9, None, "5 bytes after"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_lying_headers(case, tmp_path):
    header, data, length, message = BAD_HEADERS[case]
    path = write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(SpecError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_truncation_anywhere_is_noticed(tmp_path):
    whole = (save_model(tmp_path / "m", "llama") / "model.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(SpecError, match=r"truncated"):
            read_header(cut)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_end_in_a_spec_error_or_a_header(tmp_path_factory, noise, length):
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    path.write_bytes(struct.pack("<Q", length) + noise)
    try:
        assert isinstance(read_header(path), dict)
    except SpecError:
        pass


def test_missing_files(tmp_path):
    with pytest.raises(SpecError, match="neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(SpecError, match="save_pretrained"):
        open_checkpoint(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=r"model-1\.safetensors"):
        open_checkpoint(tmp_path)
    write_raw(tmp_path / "model-1.safetensors", {})
    with pytest.raises(SpecError, match="tensor a"):
        open_checkpoint(tmp_path)


def test_an_index_of_an_earlier_save_is_passed_over(tmp_path):
    """As transformers does, which leaves one there when it saves a model again in one file."""
    path = save_model(tmp_path / "m", "llama")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "a" not in open_checkpoint(path).tensors


@pytest.mark.parametrize("shard", ["../x.safetensors", 3, "/etc/passwd"])
def test_an_index_may_not_leave_the_directory(shard, tmp_path):
    index = {"weight_map": {"a": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match="not a file name"):
        open_checkpoint(tmp_path)


def test_unknown_tensor(tmp_path):
    checkpoint = open_checkpoint(save_model(tmp_path / "m", "llama"))
    with pytest.raises(SpecError, match="no tensor nowhere"):
        checkpoint.load("nowhere")
