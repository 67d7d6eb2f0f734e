"""Encoders on a GPU give the rows of transformers', and a batch without memory fails alone.

The GPU is emulated (`tests/lazy_gpu.py`): generated kernels as C++, torch's products on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dovetail.codegen.catalog import device_kernels
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.compiler.encoder_spec import read_encoder_spec
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, RequestError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.cuda import CudaDevice, CudaError
from dovetail.runtime.cuda_encoder import (
    CudaEncoder,
    device_bytes,
    fitting_kernels,
    open_gpu_encoder,
    place_args,
    product_ends,
    widen_tape,
)
from dovetail.runtime.cuda_pair import GpuParts
from dovetail.runtime.embedding.instance import InstanceLost
from dovetail.runtime.forward import find_tape
from dovetail.topology.hardware import read_hardware
from tests.emulated_gpu import build_driver, make_index
from tests.encoders import (
    MODERN,
    Jina,
    cosines,
    last_rows,
    random_texts,
    save_encoder,
    write_modules,
)
from tests.lazy_gpu import HostProducts, LazyDriver

CUDA = DEVICE_TARGETS["cuda"]
LENGTHS = (1, 2, 3, 17, 33, 75, 4)


SCORES = {"head": "ForSequenceClassification", "num_labels": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"modules": True}),
    "tanh": ("bert", {"hidden_act": "gelu_new", "dtype": "bfloat16"}),
    "jina": ("jina", {}),
    "modern": ("modernbert", MODERN),
    "gte": ("gte", {"pad_token_id": 0, "type_vocab_size": 0}),
    "scores": ("bert", SCORES),
    "modern-scores": ("modernbert", SCORES | MODERN),
}
"""Encoders of every kind: their family, and how they are made."""


def make_model(folder: Path, name: str) -> Any:
    """Write an encoder and return it."""
    family, options = KINDS[name]
    if family != "jina":
        model = save_encoder(folder / name, family, **options)
        if name == "modern":
            write_modules(folder / name, {"pooling_mode_cls_token": True})
        return model
    jina = Jina()
    jina.save(folder / name)
    return jina


class Gpu:
    """Encoders, and an emulated GPU with the kernels of all of them."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.models = {name: make_model(folder, name) for name in names}
        requests = {
            request.name: request
            for name in self.models
            for request in device_kernels(read_encoder_spec(folder / name), CUDA)
        }
        kernels = [lower_request(request, CUDA) for request in requests.values()]
        self.library = build_driver(kernels)
        self.kernels = {kernel.entry.name: kernel.entry for kernel in kernels}
        self.module = folder / "k.ptx", make_index(kernels)
        self.module[0].write_text("emulated")

    @contextmanager
    def load(self, name: str, *, eager: bool = False) -> Iterator[Running]:
        """Load an encoder; nothing is left of it on the GPU."""
        path = self.folder / f"{name}.dove"
        if not path.exists():
            options = {"max_context": 512} if name == "jina" else {}
            options["weight_dtype"] = read_encoder_spec(self.folder / name).weight_dtype
            compile_model(self.folder / name, output=path, effort="none", threads=2, **options)
        artifact = open_artifact(path, read_hardware())
        driver = LazyDriver(self.library, self.kernels, eager=eager)
        before = driver._c.dt_left()
        made: list[HostProducts] = []

        def make(weights: Any, ordinal: int) -> HostProducts:
            made.append(HostProducts(driver, weights, ordinal))
            return made[0]

        parts = GpuParts(CudaDevice(driver=driver), self.module, make)
        (part,) = artifact.encoders.values()
        encoder = CudaEncoder(artifact, part, parts=parts)
        yield Running(encoder, driver, made[0])
        encoder.close()
        encoder.close()
        assert driver._c.dt_left() == before


class Running:
    """A loaded encoder and what there is to see of it."""

    def __init__(self, encoder: CudaEncoder, driver: LazyDriver, products: HostProducts) -> None:
        self.encoder, self.driver, self.products = encoder, driver, products


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    """What most encoders are."""
    return Gpu(tmp_path_factory.mktemp("cuda"), ("bert", "jina"))


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    """All of them: the module has kernels that one or the other does not want."""
    return Gpu(tmp_path_factory.mktemp("every"), KINDS)


def wanted_rows(gpu: Gpu, name: str, texts: list[np.ndarray]) -> np.ndarray:
    """Return what transformers, or Jina in float64, has for each text alone."""
    model = gpu.models[name]
    if name == "jina":
        return np.array([model.rows(text).mean(0) for text in texts])
    rows = last_rows(model.float(), texts)
    if name != "modern":
        return np.array([each.mean(0) for each in rows])
    first = np.array([each[0] for each in rows])
    return first / np.linalg.norm(first, axis=1, keepdims=True)


@pytest.mark.parametrize(("name", "eager"), [("bert", False), ("jina", True)])
def test_rows_are_those_of_each_text_alone(gpu: Gpu, name: str, eager: bool) -> None:
    check_rows(gpu, name, 0.999999, eager=eager)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "least"),
    [("bert", 0.999999), ("modern", 0.999999), ("gte", 0.999999), ("tanh", 0.999)],
)
def test_rows_of_every_kind(every: Gpu, name: str, least: float) -> None:
    check_rows(every, name, least)


def check_rows(gpu: Gpu, name: str, least: float, *, eager: bool = False) -> None:
    texts = random_texts(LENGTHS)
    with gpu.load(name, eager=eager) as running:
        got = running.encoder.embed_tokens(texts)
        running.encoder.most_tokens = 40  # several passes, one of a text that is longer
        again = running.encoder.embed_tokens(texts)
    assert cosines(got, wanted_rows(gpu, name, texts)).min() > least
    np.testing.assert_allclose(again, got, atol=2e-6)
    assert running.driver.ledger.checked > 100, "the order of copies and kernels was looked at"


@pytest.mark.long
@pytest.mark.parametrize("name", ["scores", "modern-scores"])
def test_heads_that_score(every: Gpu, name: str) -> None:
    import torch

    texts = random_texts((3, 20, 60))
    with every.load(name) as running, torch.inference_mode():
        logits = running.encoder.embed_tokens(texts)
        outs = [every.models[name](torch.tensor(text)[None].long()) for text in texts]
    wanted = np.array([out.logits[0].numpy() for out in outs])
    np.testing.assert_allclose(logits, wanted, atol=2e-5)


def test_a_batch_without_memory_fails_alone(gpu: Gpu) -> None:
    texts = random_texts((5, 70, 9))
    with gpu.load("bert") as running:
        wanted = running.encoder.embed_tokens(texts)
        full = CapacityError("the GPU has no memory for a product")
        running.products.fail = lambda rows: full if rows > 80 else None
        with pytest.raises(DeviceError, match="emulated: out of memory in a pass of 84 tokens"):
            running.encoder.embed_tokens(texts)
        alone = [running.encoder.embed_tokens([text])[0] for text in texts]
    np.testing.assert_allclose(alone, wanted, atol=2e-6)


def test_a_gpu_that_fails_ends_its_process(gpu: Gpu) -> None:
    with gpu.load("bert") as running:
        fault = CudaError("cuLaunchKernel", 700, "an illegal memory access")
        running.products.fail = lambda rows: fault
        with pytest.raises(InstanceLost, match="illegal memory access"):
            running.encoder.embed_tokens([[1]])
        with pytest.raises(RequestError, match="at least one token"):
            running.encoder.embed_tokens([[]])


def test_kernels_are_chosen_for_the_encoder_among_others(gpu: Gpu) -> None:
    spec = read_encoder_spec(gpu.folder / "bert")
    other = msgspec.structs.replace(spec, weight_dtype="bf16", head_dim=64)
    requests = {r.name: r for each in (spec, other) for r in device_kernels(each, CUDA)}
    entries = {name: lower_request(request, CUDA).entry for name, request in requests.items()}
    for each, own, foreign in ((spec, "f32", "bf16"), (other, "bf16", "f32")):
        kept = fitting_kernels(each, entries)
        assert {f"embed_sum_{own}", "layernorm"} < kept.keys()
        assert f"embed_sum_{foreign}" not in kept
        assert sum(kernel.family == "packed_attention_lanes" for kernel in kept.values()) == 1
    assert product_ends(spec) == {"up": "activate_rows_gelu", "gate_up": "gate_rows_gelu"}
    scores = msgspec.structs.replace(spec, head="gelu", labels=1)
    assert product_ends(scores)["pooler"] == "activate_rows_gelu"


def test_passes_are_as_wide_as_a_gpu_wants(gpu: Gpu) -> None:
    with gpu.load("bert") as running:
        encoder = running.encoder
    artifact = open_artifact(gpu.folder / "bert.dove", read_hardware())
    (part,) = artifact.encoders.values()
    tape = find_tape(part, "encode")
    wide = widen_tape(tape)
    assert (tape.max_tokens, wide.max_tokens) == (1024, 8192)
    assert wide == encoder.tape and wide.max_sequences == 8 * tape.max_sequences
    ends = [(buffer.offset, buffer.offset + buffer.bytes) for buffer in wide.buffers]
    assert max(end for _, end in ends) <= wide.arena_bytes
    places = place_args(part.file.spec, wide)
    assert places["positions"] - places["token_ids"] == 4 * 8192
    assert places[""] - places["out"] == 4 * wide.max_sequences * part.file.spec.dim
    weights, activations = device_bytes(part.file, tape)
    assert weights >= sum(entry.bytes for entry in part.file.weights)
    assert activations == wide.arena_bytes + places[""]


def test_an_artifact_without_kernels_for_gpus_says_so(gpu: Gpu) -> None:
    with gpu.load("bert"):
        pass
    with pytest.raises(ArtifactError, match="--target cuda"):
        open_gpu_encoder(str(gpu.folder / "bert.dove"), 0)
