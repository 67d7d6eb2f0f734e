"""Attention over paged KV: backends against float64, the choice among them, and what they plan."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from dovetail.ir.model import KV_BLOCK, ModelSpec, RopeSpec
from dovetail.runtime.accel import attention_choice
from dovetail.runtime.accel import step as step_module
from dovetail.runtime.accel.attention import MASK_BYTES, MASK_PART, PlainAttention, _masks
from dovetail.runtime.accel.attention_choice import TOLERANCE, choose_attention, try_attention
from dovetail.runtime.accel.attention_flashinfer import FlashInferAttention, list_pages
from dovetail.runtime.accel.attention_flex import FlexAttention
from dovetail.runtime.accel.device import TYPES, TorchDevice, first_line
from dovetail.runtime.accel.executor import DeviceExecutor
from dovetail.runtime.accel.step import Attended, PagedAttention, Step
from dovetail.runtime.app import load
from tests.runtime.accel.engines import ASKED, LIMITS, PROMPTS, make_artifact

DEVICE = TorchDevice("torch:cpu")
CPU = torch.device("cpu")
SEQUENCES = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=5)


def make_spec(**more: Any) -> ModelSpec:
    given: dict[str, Any] = {"family": "llama", "vocab_size": 100, "hidden_size": 64}
    given |= {"intermediate_size": 64, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2}
    given |= {"head_dim": 16, "max_position": 128, "max_context": 128, "norm_eps": 1e-5}
    given |= {"rope": RopeSpec(rotary_dim=16), "weight_dtype": "f32", "checkpoint_dtype": "f32"}
    return ModelSpec(**(given | more))


def attend(
    made: PagedAttention, sequences: list[tuple[int, int]], window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a backend makes of sequences of (keys, queries), and the same in float64.

    Those of several queries come first, as prompts; the others are decodes.
    """
    ordered = sorted(((k, min(k, q)) for k, q in sequences), key=lambda each: each[1] == 1)
    prompts = sum(queries > 1 for _, queries in ordered)
    n_q, n_kv, size, draw = 6, 2, 16, np.random.default_rng(len(sequences))
    lengths = np.array([keys for keys, _ in ordered], np.int32)
    starts = np.cumsum([0, *(queries for _, queries in ordered)]).astype(np.int32)
    counts = -(-lengths // KV_BLOCK)
    blocks = draw.permutation(int(counts.sum()) + 3)
    tables = np.full((len(ordered), int(counts.max()) + 1), 7777, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    pools = draw.standard_normal((2, int(counts.sum()) + 4, n_kv, KV_BLOCK, size), np.float32)
    pools[:, -1] = 0.0
    q = draw.standard_normal((int(starts[-1]), n_q, size), np.float32)
    host = {"block_tables": tables, "seq_lengths": lengths, "seq_starts": starts}
    numbers = {"n_prefill": prompts, "n_decode": len(ordered) - prompts}
    numbers |= {"decode_row": int(starts[prompts])}
    there = {n: torch.from_numpy(a).to(made.device) for n, a in host.items()}
    step = Step(host, there, numbers)
    over = Attended(n_q, n_kv, 0.3, window, *torch.from_numpy(pools).to(made.device))
    made.add(over)
    made.begin(step)
    rows = torch.from_numpy(q.reshape(len(q), -1)).to(made.device)
    out = torch.zeros_like(rows)
    if prompts:
        made.prompts(step, rows, out, over)
    if prompts < len(ordered):
        made.decodes(step, rows, out, over)
    wanted = np.zeros(q.shape)
    for table, keys, first, last in zip(tables, lengths, starts, starts[1:], strict=False):
        k, v = (
            p[table[: -(-keys // KV_BLOCK)]].swapaxes(0, 1).reshape(n_kv, -1, size) for p in pools
        )
        for row in range(first, last):
            at = keys - (last - row)
            seen = slice(max(0, at + 1 - window) if window else 0, at + 1)
            for head in range(n_q):
                scores = k[head // 3, seen].astype(np.float64) @ q[row, head] * 0.3
                weights = np.exp(scores - scores.max())
                wanted[row, head] = weights @ v[head // 3, seen] / weights.sum()
    return out.cpu().numpy().reshape(q.shape), wanted


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(SEQUENCES, st.sampled_from([0, 5, 16, 40]), st.sampled_from([1 << 10, 1 << 26]))
def test_plain_attention_is_that_of_float64(
    accelerator: str, sequences: list[tuple[int, int]], window: int, bound: int
) -> None:
    """However little may be gathered or masked at once.

    A GPU's kernels may make a product of float32 of three of TF32, which round a little more.
    """
    device = TorchDevice(accelerator).device
    with pytest.MonkeyPatch.context() as bounds:
        bounds.setitem(step_module.MOMENT, device.type, bound)
        found, wanted = attend(PlainAttention(device), sequences, window)
    atol = 2e-5 if device == CPU else TOLERANCE[torch.float32]
    np.testing.assert_allclose(found, wanted, atol=atol)


@given(st.integers(1, 300), st.integers(0, 300), st.sampled_from([0, 9]))
def test_no_mask_is_larger_than_is_counted(queries: int, before: int, window: int) -> None:
    bound, keys, seen = 1 << 14, before + queries, 0
    with pytest.MonkeyPatch.context() as bounds:
        bounds.setitem(step_module.MOMENT, "cpu", bound)
        for part, mask in _masks(queries, keys, window, CPU):
            assert part.start == seen
            seen = part.stop
            if mask is not None:
                assert mask.shape == (part.stop - part.start, keys)
                assert mask.numel() * MASK_BYTES <= max(bound / MASK_PART, keys * MASK_BYTES)
    assert seen == queries


@settings(max_examples=5, deadline=None)
@given(SEQUENCES, st.sampled_from([0, 5, 40]))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_that_of_float64(sequences: list[tuple[int, int]], window: int) -> None:
    found, wanted = attend(FlexAttention(CPU), sequences, window)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_pages_name_the_blocks_of_each_sequence_in_order(lengths: list[int], draw: Any) -> None:
    counts = [-(-length // KV_BLOCK) for length in lengths]
    tables = np.full((len(lengths), max(counts) + 2), 999, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [draw.randrange(500) for _ in range(count)]
    pages = list_pages(tables, np.array(lengths, np.int32))
    assert all(part.dtype == np.int32 for part in pages)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = pages.indices[pages.indptr[row] : pages.indptr[row + 1]]
        assert own.tolist() == tables[row, :count].tolist()
        assert (count - 1) * KV_BLOCK + pages.last[row] == length and 1 <= pages.last[row] <= 16
    assert len(pages.indices) == pages.indptr[-1]


class Wrapper:
    """Stands for FlashInfer's: keeps what it was planned with, and answers with its name."""

    def __init__(self, space: torch.Tensor, layout: str, **more: Any) -> None:
        assert layout == "HND"
        self.buffers, self.planned = more, list[Any]()

    def plan(self, *given: Any, **more: Any) -> None:
        self.planned.append((given, more))

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.is_contiguous() and q.dim() == 3 and kv[0].dim() == 4
        return q + len(self.planned)


def test_flashinfer_is_planned_once_a_step_for_each_kind_of_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not run here: what it is told is what its documentation asks for."""
    library = type("Library", (), {})()
    for name in ("Decode", "Prefill"):
        setattr(library, f"Batch{name}WithPagedKVCacheWrapper", Wrapper)
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", library)
    made = FlashInferAttention(CPU)
    tables = np.array([[4, 5, 0], [1, 2, 3], [6, 0, 0]], np.int32)
    host = {"block_tables": tables, "seq_lengths": np.array([20, 48, 1], np.int32)}
    host |= {"seq_starts": np.array([0, 7, 8, 9], np.int32)}
    counts = {"n_prefill": 1, "n_decode": 2, "decode_row": 7, "n_tokens": 9}
    step = Step(host, {}, counts)
    pool = torch.zeros(8, 2, KV_BLOCK, 64)
    kinds = [Attended(8, 2, 0.125, window, pool, pool) for window in (0, 32)]
    for over in kinds:
        made.add(over)
        made.add(over)
    rows = torch.zeros(9, 8 * 64)
    for recorded, tokens in ((False, 9), (True, 2), (True, 9), (False, 9)):
        step.recorded, counts["n_tokens"] = recorded, tokens
        step.shared.clear()
        made.begin(step)
        for over in kinds:
            out = rows.clone()
            made.prompts(step, rows, out, over)
            made.decodes(step, rows, out, over)
            assert (out[:7] > 0).all() and (out[7:] > 0).all()
    wrappers = made._wrappers
    assert {key[1:] for key in wrappers if key[0] == "decodes"} == {
        (0, 0),
        (32, 0),
        (0, 2),
        (32, 2),
    }
    decodes, prompts = wrappers["decodes", 32, 0], wrappers["prompts", 32, 0]
    (indptr, indices, last, *heads), told = decodes.planned[-1]
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 3, 4], [1, 2, 3, 6], [16, 1])
    assert heads == [8, 2, 64, KV_BLOCK] and told["window_left"] == 31 and told["sm_scale"] == 0.125
    (starts, indptr, indices, last, *heads), told = prompts.planned[-1]
    assert (starts.tolist(), indices.tolist(), last.tolist()) == ([0, 7], [4, 5], [4])
    assert told["causal"] and told["window_left"] == 31 and heads == [8, 2, 64, KV_BLOCK]
    assert wrappers["decodes", 0, 0].planned[0][1]["window_left"] == -1
    held = wrappers["decodes", 0, 2].buffers
    assert held["use_cuda_graph"] and held["use_tensor_cores"]
    assert [len(held[f"paged_kv_{n}_buffer"]) for n in ("indptr", "indices", "last_page_len")] == [
        3,
        tables.size,
        2,
    ]
    assert len(decodes.planned) == 3, "once a step that is not recorded, or not whole"


class Wrong(PlainAttention):
    """Forgets the scale."""

    name = "one that is wrong"

    @staticmethod
    def fits(*_: object) -> bool:
        return True

    def add(self, over: Attended) -> None:
        super().add(over._replace(scale=1.0))

    def decodes(self, step: Step, q: torch.Tensor, out: torch.Tensor, over: Attended) -> None:
        super().decodes(step, q, out, over._replace(scale=1.0))


class Broken(Wrong):
    """Raises what only a library knows."""

    name = "one that is broken"

    def begin(self, step: Step) -> None:
        raise LookupError("no kernel for this GPU\nand a page of C++")


class Elsewhere(Wrong):
    """Is for another device."""

    @staticmethod
    def fits(*_: object) -> bool:
        return False


class Right(Wrong):
    """Computes as plain torch does."""

    name = "one that is right"
    add, decodes = PlainAttention.add, PlainAttention.decodes


def test_the_first_backend_that_is_there_and_right_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec(sliding_window=20, window_layers=(True, False))
    assert choose_attention(DEVICE, spec, torch.float32) is PlainAttention
    assert not caplog.messages
    monkeypatch.setattr(attention_choice, "BACKENDS", (Elsewhere, Broken, Wrong, Right))
    with caplog.at_level(logging.WARNING):
        assert choose_attention(DEVICE, spec, torch.float32) is Right
    assert len(caplog.messages) == 2
    assert "one that is broken attention is disabled: no kernel for this GPU" in caplog.messages[0]
    assert "one that is wrong attention is disabled: results differ by" in caplog.messages[1]
    monkeypatch.setattr(attention_choice, "BACKENDS", (Wrong,))
    assert choose_attention(DEVICE, spec, torch.float32) is PlainAttention


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_backends_pass_the_check_in_every_type(dtype: torch.dtype) -> None:
    for backend in (PlainAttention, FlexAttention):
        assert try_attention(backend(CPU), DEVICE, make_spec(), dtype) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # a backend may compile for minutes
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("backend", attention_choice.BACKENDS)
def test_backends_that_fit_a_gpu_pass_the_check(backend: Any, dtype: str) -> None:
    """With windows and without, recorded or not; a bf16 value keeps 8 bits: see TOLERANCE.

    Skipped where a backend raises, which a sound machine without its compiler makes it do.
    """
    device, kind, size = TorchDevice("cuda"), TYPES[dtype], 64
    if not backend.fits(device.device, kind, kind, size):
        pytest.skip(f"{backend.name} is not there for {dtype} on this GPU")
    windows = {"sliding_window": 20, "window_layers": (True, False)}
    spec = make_spec(head_dim=size, kv_dtype=dtype, **windows)
    try:
        found = try_attention(backend(device.device), device, spec, kind)
    except Exception as error:  # as choose_attention, which then takes another
        pytest.skip(f"{backend.name} does not work here: {first_line(error)}")
    assert found <= TOLERANCE[kind]


def test_backends_are_for_devices_that_have_them() -> None:
    cuda = torch.device("cuda")
    assert not FlashInferAttention.fits(CPU, torch.float16, torch.float16, 64)
    assert not FlashInferAttention.fits(cuda, torch.float16, torch.float32, 64)
    assert not FlashInferAttention.fits(cuda, torch.float16, torch.float16, 80)
    assert not FlexAttention.fits(CPU, torch.float32, torch.float32, 64)
    assert not FlexAttention.fits(cuda, torch.float16, torch.float32, 64)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_an_engine_on_flex_attention_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, found = make_artifact(tmp_path), []
    given: dict[str, Any] = {"device": "torch:cpu", "offload": "off", "gpu_blocks": 9, **LIMITS}
    monkeypatch.setattr(FlexAttention, "fits", staticmethod(lambda *_: True))
    for backends in ((), (FlexAttention,)):
        monkeypatch.setattr(attention_choice, "BACKENDS", backends)
        with load(artifact, **given) as app:
            executor = app.engine.executor
            assert isinstance(executor, DeviceExecutor)
            used = executor.pair.model.attention
            assert used is (FlexAttention if backends else PlainAttention)
            found.append([done.token_ids for done in app.generate(PROMPTS[:6], **ASKED)])
    assert found[0] == found[1]
