"""The header of GGUF files: what is read, and files that lie; one sentence for each fault."""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.compiler.files import gguf_file
from dovetail.compiler.files.gguf_file import read_gguf
from dovetail.compiler.models.source import open_model
from dovetail.compiler.models.spec import read_model_spec
from dovetail.ir.errors import DovetailError, SpecError
from tests.gguf_files import add_tokenizer, save_gguf
from tests.models import save_model
from tests.repository import ROOT

TINY = ROOT / "examples" / "tiny_world" / "models" / "llama"


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, shape, kind, offset):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(*parts, version=3, tensors=0, keys=0, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def one(name="a", shape=(4,), kind=0, offset=0, data=64, keys=(), copies=1):
    """Return a file of one tensor, `data` bytes behind it."""
    entry = tensor(name, shape, kind, offset)
    head = header(*keys, *[entry] * copies, tensors=copies, keys=len(keys))
    return head + bytes(-len(head) % 32 + data)


def test_all_types_of_values(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("eps", 1e-5)
    writer.add_float64("double", 0.1)
    writer.add_int64("long", -(1 << 40))
    writer.add_bool("yes", True)
    writer.add_string("text", "tschüß")
    writer.add_array("texts", ["a", "", "漢"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    values = dict(file.values)
    assert values.pop("numbers").tolist() == [1, 2, 3]
    assert values.pop("flags").tolist() == [1, 0]
    assert values == {
        "general.architecture": "llama",
        "eps": 1e-5,
        "double": 0.1,
        "long": -(1 << 40),
        "yes": True,
        "text": "tschüß",
        "texts": ["a", "", "漢"],
    }
    assert file.tensors["t"].shape == (2, 3)


def test_an_older_version_and_another_alignment(tmp_path):
    keys = (key("general.alignment", 4, struct.pack("<I", 8)),)
    path = tmp_path / "m.gguf"
    for version in (2, 3):
        head = header(*keys, tensor("a", (2,), 0, 0), version=version, tensors=1, keys=1)
        path.write_bytes(head + bytes(-len(head) % 8) + struct.pack("<2f", 1, 2))
        info = read_gguf(path).tensors["a"]
        assert info.end == path.stat().st_size and info.end - info.start == 8


ALIGN = "general.alignment"
BAD = {
    "empty": (b"", "not a GGUF file"),
    "another magic": (header(magic=b"GGML"), "not a GGUF file"),
    "cut in the version": (b"GGUF\x03", "truncated or damaged"),
    "version 1": (header(version=1), "GGUF version 1"),
    "version 9": (header(version=9), "GGUF version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (header(tensors=1 << 40), "claims 1099511627776 tensors"),
    "many keys": (header(keys=1 << 40), "claims 1099511627776 keys"),
    "fewer keys than claimed": (header(keys=3), "truncated or damaged"),
    "a long key": (header(struct.pack("<Q", 1 << 60), keys=1), "claims 1152921504606846976 bytes"),
    "a long string": (
        header(key("a", 8, struct.pack("<Q", 1 << 20)), keys=1),
        "truncated or damaged",
    ),
    "no UTF-8": (header(key("a", 8, text(b"\xff\xfe")), keys=1), "is not UTF-8"),
    "an unknown type": (header(key("a", 77, b"1234"), keys=1), "unknown type 77"),
    "a long array": (
        header(key("a", 9, struct.pack("<IQ", 4, 1 << 61)), keys=1),
        "truncated or damaged",
    ),
    "many strings": (
        header(key("a", 9, struct.pack("<IQ", 8, 1 << 61)), keys=1),
        "claim 2305843009213693952 strings",
    ),
    "nested arrays": (
        header(key("a", 9, struct.pack("<IQ", 9, 1)), keys=1),
        "array of type 9",
    ),
    "a key twice": (header(*[key("a", 7, b"\1")] * 2, keys=2), "key a is there twice"),
    "alignment 0": (header(key(ALIGN, 4, struct.pack("<I", 0)), keys=1), "no power of two"),
    "alignment 48": (header(key(ALIGN, 4, struct.pack("<I", 48)), keys=1), "no power of two"),
    "alignment text": (header(key(ALIGN, 8, text("32")), keys=1), "no power of two"),
    "a tensor twice": (one(copies=2), "tensor a is there twice"),
    "no dimensions": (one(shape=()), "0 dimensions"),
    "many dimensions": (one(shape=(1,) * 5), "5 dimensions"),
    "an unknown tensor type": (
        one(kind=99),
        "number 99, which is not supported; take a file of F32",
    ),
    "a type not read": (
        one(shape=(256, 1), kind=16),
        "IQ2_XXS, which is not supported; .* F32.*Q6_K",
    ),
    "half a block": (one(shape=(33, 2), kind=8), "rows of 33 values are no blocks of 32"),
    "a quantised vector": (one(shape=(32,), kind=8), "vector of type Q8_0"),
    "past the end": (one(shape=(1000,)), "truncated or damaged: download it again"),
    "far past the end": (one(offset=1 << 62), "truncated or damaged"),
    "huge": (one(shape=(1 << 40, 1 << 40)), "truncated or damaged"),
    "not aligned": (one(offset=4), "in steps of 32"),
    "split without its parts": (
        header(key("split.count", 2, struct.pack("<H", 3)), keys=1),
        "one of 3 files",
    ),
    "split into none": (
        header(key("split.count", 8, text("many")), keys=1),
        "no number of files",
    ),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_bad_files(data, message, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(SpecError, match=message) as found:
        read_gguf(path)
    assert str(path) in str(found.value)


def test_tensors_that_overlap(tmp_path):
    entries = tensor("a", (64,), 0, 0) + tensor("b", (64,), 0, 32)
    head = header(entries, tensors=2)
    (tmp_path / "m.gguf").write_bytes(head + bytes(1024))
    with pytest.raises(SpecError, match="tensor b overlaps a"):
        read_gguf(tmp_path / "m.gguf")


def test_neither_a_directory_nor_a_file(tmp_path):
    with pytest.raises(SpecError, match="neither a Hugging Face model directory nor a GGUF file"):
        open_model(tmp_path / "none.gguf")


def test_a_directory_of_gguf_files_names_one(tmp_path):
    (tmp_path / "m.gguf").write_bytes(header())
    with pytest.raises(SpecError, match=rf"give {tmp_path}/m\.gguf"):
        read_model_spec(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return the bytes of a whole model of the tiny world's vocabulary, and where they may go."""
    folder = tmp_path_factory.mktemp("fuzz")
    options = {"vocab_size": 768, "hidden_size": 32, "intermediate_size": 32}
    model = save_model(folder / "m", "llama", num_hidden_layers=1, **options)
    path = save_gguf(folder / "m.gguf", model, "Q8_0", tokenizer=add_tokenizer(TINY))
    return path.read_bytes(), folder / "bad.gguf"


MOST_BYTES = 64 << 20
"""A sound read takes 2 MiB; what a header claims may not count."""
NUMBERS = st.sampled_from([0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, 1 << 63])


@given(data=st.data())
def test_a_fuzzed_file_is_one_sentence(small, data):
    """Any bytes in a header's place: a model or one of our errors, within bounded memory."""
    whole, path = small
    end = len(whole) - 768 * 34  # most of what is behind are blocks of weights
    changed = bytearray(whole[: data.draw(st.sampled_from([len(whole), end // 2]))])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, min(end, len(changed)) - 8))
        new = data.draw(
            st.one_of(NUMBERS.map(lambda n: struct.pack("<Q", n)), st.binary(max_size=8))
        )
        changed[at : at + len(new)] = new
    path.write_bytes(changed)
    tracemalloc.start()
    try:
        source = open_model(path)
        read_model_spec(source)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            source.file(name)
        for name in source.checkpoint().tensors:
            source.checkpoint().load(name)
    except DovetailError as error:
        assert "\n" not in str(error).strip()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES


def test_a_header_may_not_hold_more_strings_than_a_vocabulary_has(tmp_path, monkeypatch):
    """Empty strings are 8 bytes in a file and more in memory."""
    monkeypatch.setattr(gguf_file, "MAX_STRINGS", 1000)
    arrays = [
        key(f"a{i}", 9, struct.pack("<IQ", 8, 600) + struct.pack("<Q", 0) * 600) for i in range(2)
    ]
    (tmp_path / "m.gguf").write_bytes(header(*arrays, keys=2))
    with pytest.raises(SpecError, match="claim 1200 strings"):
        read_gguf(tmp_path / "m.gguf")
