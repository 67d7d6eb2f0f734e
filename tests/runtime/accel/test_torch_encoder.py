"""Encoders on a torch device give the rows of the CPU's; a batch without memory fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.errors import ArtifactError, DeviceError, RequestError
from dovetail.runtime.accel import packed_attention
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.accel.encoder import TorchEncoder, open_torch_encoder
from dovetail.runtime.accel.packed_attention import (
    Heads,
    attend_groups,
    attend_varlen,
    find_varlen,
)
from dovetail.runtime.accel.tape import Step
from dovetail.runtime.artifact import EncoderPart, open_artifact
from dovetail.runtime.child.child import ChildLost
from dovetail.runtime.native.encoder import Encoder, device_bytes
from dovetail.topology.hardware import read_hardware
from tests.encoders import (
    GEMMA,
    MODERN,
    PADDED,
    Dense,
    Jina,
    cosines,
    last_rows,
    random_texts,
    save_decoder,
    save_encoder,
    write_modules,
)
from tests.models import FAMILIES as DECODERS

LENGTHS = (1, 2, 3, 17, 33, 75, 4, 70, 9, 200)
SCORES = {"head": "ForSequenceClassification", "num_labels": 3}
LAST = {"pooling_mode": "lasttoken"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"modules": True}),
    "roberta": (
        "roberta",
        PADDED | {"type_vocab_size": 1, "hidden_act": "gelu_new"},
    ),
    "last": ("bert", {}),
    "half": ("bert", {"dtype": "bfloat16"}),
    "quantised": ("bert", {"modules": True}),
    "jina": ("jina", {}),
    "modern": ("modernbert", MODERN),
    "gte": ("gte", {"pad_token_id": 0, "type_vocab_size": 0}),
    "mpnet": ("mpnet", PADDED),
    "mpnet-half": ("mpnet", PADDED | {"dtype": "bfloat16"}),
    "nomic": ("nomic", {}),
    "nomic-quantised": ("nomic", {}),
    "scores": ("bert", SCORES),
    "mpnet-scores": ("mpnet", SCORES | PADDED),
    "modern-scores": ("modernbert", SCORES | MODERN),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma": ("gemma3", {"pooling": "mean_tokens", "dense": [Dense(48, 64)], **GEMMA}),
    "qwen3-quantised": ("qwen3", {"pooling": "mean_tokens"}),
}
"""Encoders of every kind: their family, and how they are made."""
DTYPES = {
    **dict.fromkeys(("half", "mpnet-half"), "bf16"),
    **dict.fromkeys(("quantised", "nomic-quantised", "qwen3-quantised"), "int8"),
}
"""Weights that are not float32: the CPU's kernels round what they multiply."""


class Shelf:
    """Artifacts of encoders, made as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.models = folder, dict[str, Any]()

    def path(self, name: str) -> Path:
        path = self._folder / f"{name}.dove"
        if name not in self.models:
            self.models[name] = self._make(name)
            options = {"max_context": 512} if name == "jina" else {}
            options["weight_dtype"] = DTYPES.get(name, "f32")
            source = self._folder / name
            compile_model(source, output=path, effort="none", threads=1, **options)
        return path

    def part(self, name: str) -> EncoderPart:
        (part,) = open_artifact(self.path(name), read_hardware()).encoders.values()
        return part

    def cpu(self, name: str) -> Encoder:
        artifact = open_artifact(self.path(name), read_hardware())
        return Encoder(artifact, self.part(name), PhasePlan(threads=1, cpus=()))

    def _make(self, name: str) -> Any:
        family, options = KINDS[name]
        where = self._folder / name
        if family == "jina":
            jina = Jina()
            jina.save(where)
            return jina
        save = save_decoder if family in DECODERS else save_encoder
        model = save(where, family, **options)
        if name == "modern":
            write_modules(where, {"pooling_mode_cls_token": True})
        if name == "last":
            write_modules(where, LAST)
        return model


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("encoders"))


@pytest.fixture
def device(accelerator: str) -> TorchDevice:
    return TorchDevice(accelerator, 1)


@pytest.fixture
def bert(shelf: Shelf, device: TorchDevice) -> Iterator[TorchEncoder]:
    with closing(TorchEncoder(shelf.part("bert"), device, "f32")) as encoder:
        yield encoder


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_cpus(shelf: Shelf, device: TorchDevice, name: str) -> None:
    """Of float32 alike but for the order of sums; a bf16 value keeps 8 bits, and errors add up."""
    texts = random_texts(LENGTHS)
    with closing(shelf.cpu(name)) as encoder:
        wanted = encoder.embed_tokens(texts)
    with closing(TorchEncoder(shelf.part(name), device, "f32")) as encoder:
        got = encoder.embed_tokens(texts)
        encoder.most_tokens = 90  # several passes, one of a text that is longer
        again = encoder.embed_tokens(texts)
    if name in DTYPES:
        assert cosines(got, wanted).min() > 0.9995
    else:
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(again, got, atol=1e-5)
    with closing(TorchEncoder(shelf.part(name), device, "bf16")) as encoder:
        assert cosines(encoder.embed_tokens(texts), wanted).min() > 0.999


def test_rows_are_those_of_each_text_alone(shelf: Shelf, bert: TorchEncoder) -> None:
    texts = random_texts(LENGTHS)
    rows = [each.mean(0) for each in last_rows(shelf.models["bert"], texts)]
    assert cosines(bert.embed_tokens(texts), np.array(rows)).min() > 0.999999


def test_long_texts_are_attended_a_stretch_at_a_time(
    shelf: Shelf, device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By biases and by reach, also of causal rows, queries see the same keys as all at once."""
    texts = random_texts((200, 75, 190))
    for name in ("jina", "mpnet", "modern", "mistral"):
        with closing(TorchEncoder(shelf.part(name), device, "f32")) as encoder:
            wanted = encoder.embed_tokens(texts)
            with monkeypatch.context() as few:
                few.setattr(packed_attention, "MASK_VALUES", 5000)
                got = encoder.embed_tokens(texts)
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def varlen_as_documented(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    most: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What torch says of `varlen_attn`, text by text: its kernel is for NVIDIA's devices."""
    assert starts is ends and starts.dtype is torch.int32 and longest == most
    out = torch.empty_like(q)
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        places = torch.arange(last - first)
        ahead = places - places[:, None]
        left, right = window_size
        left, right = (most if side < 0 else side for side in (left, right))
        seen = (ahead >= -left) & (ahead <= right)
        parts = (part[first:last].transpose(0, 1) for part in (q, k, v))
        found = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale)
        out[first:last] = found.transpose(0, 1)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reach", [0, 5])
def test_the_kernel_for_any_lengths_is_given_what_groups_have(reach: int, causal: bool) -> None:
    starts = np.array([0, 3, 20, 21, 61, 80], np.int32)
    heads = Heads(2, 2, 8, 0.3, reach, causal, None)
    qkv = torch.randn(80, 3 * 16, generator=torch.Generator().manual_seed(1))
    step = Step({"seq_starts": starts}, {"seq_starts": torch.from_numpy(starts)})
    found, wanted = torch.zeros(80, 16), torch.zeros(80, 16)
    attend_varlen(step, qkv, found, heads, varlen_as_documented)
    attend_groups(step, qkv, wanted, heads)
    torch.testing.assert_close(found, wanted)
    assert find_varlen(torch.device("cpu"), torch.bfloat16, heads) is None


def test_a_kernel_for_any_lengths_that_knows_no_windows_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of torch 2.10, which would refuse every pass."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    given = torch.device("cuda"), torch.bfloat16, Heads(2, 2, 8, 0.3, 0, False, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_as_documented)
    assert find_varlen(*given) is varlen_as_documented
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, *, is_causal=False: q)
    assert find_varlen(*given) is None


def test_a_batch_without_memory_fails_alone(
    bert: TorchEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = random_texts((5, 70, 9))
    wanted, run = bert.embed_tokens(texts), bert._bound.run  # type: ignore[union-attr]
    for full in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):

        def fail(span: range, step: Step, full: RuntimeError = full) -> None:
            if step.counts["n_tokens"] > 80:
                raise full
            run(span, step)

        monkeypatch.setattr(bert._bound, "run", fail)
        with pytest.raises(DeviceError, match=f"{bert._device.name}: out of .* of 84 tokens"):
            bert.embed_tokens(texts)
        alone = [bert.embed_tokens([text])[0] for text in texts]
        np.testing.assert_allclose(alone, wanted, atol=2e-6)


def test_a_device_that_fails_ends_its_process(
    bert: TorchEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(span: range, step: Step) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bert._bound, "run", fail)
    with pytest.raises(ChildLost, match="illegal memory access"):
        bert.embed_tokens([[1]])
    with pytest.raises(RequestError, match="at least one token"):
        bert.embed_tokens([[]])


def test_the_room_of_an_encoder_is_foretold(shelf: Shelf, bert: TorchEncoder) -> None:
    part = shelf.part("bert")
    weights, activations = device_bytes(part.file, bert.tape, 4)
    bound = bert._bound
    assert bound is not None
    held = sum(weight.nbytes for weight in bound.model.weights.values())
    assert weights == held
    buffers = sum(buffer[:1].nbytes for buffer in bound.buffers.values())
    assert activations > 8192 * buffers


def test_an_encoder_is_opened_by_name_on_a_device(shelf: Shelf, accelerator: str) -> None:
    path, texts = str(shelf.path("bert")), random_texts((4, 20))
    with closing(open_torch_encoder(path, accelerator)) as encoder:
        name = next(iter(open_artifact(path, read_hardware()).encoders))
        with closing(open_torch_encoder(path, accelerator, name)) as same:
            np.testing.assert_array_equal(encoder.embed_tokens(texts), same.embed_tokens(texts))
        encoder.close()
    with pytest.raises(ArtifactError, match="no encoder called 'other'"):
        open_torch_encoder(path, accelerator, "other")
    with pytest.raises(DeviceError, match="has no device npu:0"):
        open_torch_encoder(path, "npu:0")
