"""A toy artifact made by hand: real files, a real library and team, and a model that hashes."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from dovetail.ir.artifact import (
    FileEntry,
    KernelEntry,
    KernelIndex,
    KernelParam,
    Manifest,
    PhasePlan,
    ServicePlan,
)
from dovetail.ir.graph import ExecutionGraph, Placement
from dovetail.ir.model import ModelFile, ModelSpec, RopeSpec, WeightChunks, WeightEntry
from dovetail.ir.place import place, serving_graph
from dovetail.ir.schedule import Row, ScheduleFile, ScheduleTable
from dovetail.ir.tape import FORWARD_ARGS, SAMPLE_ARGS, ArgRef, Entry, IntConst, KvRef, Slot, Tape
from dovetail.runtime.machine.abi import ABI

ROOT = Path(__file__).parents[2]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
VOCAB, HEAD_DIM, MAX_CONTEXT = 97, 2, 256
EOS = 5
MODEL = "models/llm"


@pytest.fixture(params=["torch:cpu", GPU])
def accelerator(request: pytest.FixtureRequest) -> str:
    """A device of torch: cores of this machine, and a GPU where there is one."""
    name: str = request.param
    return name


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(value))


def args(*names: str) -> list[Slot]:
    return [ArgRef(name=name) for name in names]


def forward_tape(max_tokens: int, max_sequences: int) -> Tape:
    pool, dim = KvRef(pool="k", layer=0), IntConst(value=HEAD_DIM)
    store = [*args("n_tokens", "token_ids", "kv_slots"), pool, dim]
    logits = [
        *args("n_out"),
        IntConst(value=VOCAB),
        *args("out_rows", "positions", "n_prefill", "n_decode", "seq_starts", "seq_lengths"),
        *args("block_tables", "table_stride"),
        pool,
        dim,
        *args("logits", "logits_stride"),
    ]
    return Tape(
        name="forward",
        args=FORWARD_ARGS,
        buffers=(),
        arena_bytes=64,
        entries=(
            Entry(op="store", slots=tuple(store), m="n_tokens", segment="pre_attn(0)"),
            Entry(op="logits", slots=tuple(logits), m="n_out", segment="head"),
        ),
        max_tokens=max_tokens,
        max_sequences=max_sequences,
    )


def sample_tape(max_sequences: int) -> Tape:
    entry = Entry(op="sample", slots=(*args(*SAMPLE_ARGS), IntConst(value=VOCAB)), m="n_rows")
    return Tape(
        name="sample",
        args=SAMPLE_ARGS,
        buffers=(),
        arena_bytes=64,
        entries=(entry,),
        max_tokens=max_sequences,
        max_sequences=max_sequences,
    )


SPEC = ModelSpec(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=4,
    intermediate_size=4,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=HEAD_DIM,
    max_position=MAX_CONTEXT,
    max_context=MAX_CONTEXT,
    norm_eps=1e-5,
    rope=RopeSpec(rotary_dim=HEAD_DIM),
    weight_dtype="f32",
    checkpoint_dtype="f32",
    eos_token_ids=(EOS,),
)
KERNELS = {"store": 5, "logits": 14, "sample": 11}


def kernel_entry(op: str, slots: int) -> KernelEntry:
    params = tuple(KernelParam(name=f"p{i}", type="i64", kind="slot") for i in range(slots))
    return KernelEntry(name=f"toy_{op}", family=op, params=params, binding={})


def table(op: str) -> ScheduleTable:
    return ScheduleTable(
        target="generic",
        op=op,
        n=0,
        k=0,
        dtype="f32",
        phase="any",
        threads=1,
        rows=(Row(m_lo=1, kernel=f"toy_{op}", schedule=(0,) * 9),),
    )


def seal(path: Path) -> None:
    """Write the manifest over whatever lies in the folder now."""
    names = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
    files = {}
    for name in names:
        data = (path / name).read_bytes()
        hashed = None if name.endswith("weights.bin") else hashlib.sha256(data).hexdigest()
        files[name] = FileEntry(bytes=len(data), sha256=hashed)
    files.pop("manifest.json", None)
    manifest = Manifest(
        producer="test",
        created="2026-01-01T00:00:00Z",
        model_fingerprint="",
        workload_fingerprint="",
        targets=("generic",),
        models=("llm",),
        effort="fast",
        files=files,
    )
    write_json(path / "manifest.json", manifest)


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "toy.so"
    templates = ROOT / "codegen/templates"
    sources = [str(Path(__file__).parent / "toy_model.c")]
    sources += [str(templates / name) for name in ("team.c", "collective.c")]
    flags = ["-O1", "-shared", "-fPIC", "-pthread", f"-I{templates}", "-o", str(out)]
    subprocess.run(["gcc", "-std=c11", *flags, *sources], check=True)
    return out


def served(plan: ServicePlan) -> ExecutionGraph:
    """Return the graph of a model that is served so, and of searches by two threads anywhere."""
    return place(serving_graph(("llm",), (), Placement(threads=2)), {"llm": plan})


@pytest.fixture
def make_artifact(tmp_path: Path, toy_library: Path) -> Callable[..., Path]:
    def make(
        *,
        name: str = "toy.dove",
        max_tokens: int = 32,
        max_sequences: int = 8,
        kv_blocks: int = 64,
        tokenizer: Path | None = None,
        threads: tuple[int, int] = (2, 2),
    ) -> Path:
        path = tmp_path / name
        forward, sample = forward_tape(max_tokens, max_sequences), sample_tape(max_sequences)
        weights = b"\1" * 10_000
        chunks = [weights[i : i + 4096] for i in range(0, len(weights), 4096)]
        index = KernelIndex(
            target="generic",
            abi=ABI,
            library="toy.so",
            source="toy.c",
            compiler="gcc",
            flags=(),
            kernels=tuple(kernel_entry(op, slots) for op, slots in KERNELS.items()),
        )
        model = ModelFile(
            name="llm",
            spec=SPEC,
            weights=(
                WeightEntry(
                    name="w", layout="vector", dtype="f32", n=8, k=1, offset=4096, bytes=32
                ),
            ),
            max_step_tokens=max_tokens,
            max_step_sequences=max_sequences,
            tokenizer="tokenizer.json" if tokenizer else None,
        )
        hashes = tuple(hashlib.sha256(chunk).hexdigest() for chunk in chunks)
        prefill, decode = (PhasePlan(threads=count, cpus=()) for count in threads)
        service = ServicePlan(
            prefill=prefill, decode=decode, kv_blocks=kv_blocks, prefill_token_threshold=8
        )
        values: Sequence[tuple[str, object]] = (
            (f"{MODEL}/model.json", model),
            (f"{MODEL}/tapes/forward.json", forward),
            (f"{MODEL}/tapes/sample.json", sample),
            (f"{MODEL}/schedules.json", ScheduleFile(tables=tuple(table(op) for op in KERNELS))),
            (
                f"{MODEL}/weights/chunks.json",
                WeightChunks(chunk_bytes=4096, total_bytes=len(weights), sha256=hashes),
            ),
            ("kernels/generic/index.json", index),
            ("graph/serve.json", served(service).file),
        )
        for file, value in values:
            write_json(path / file, value)
        (path / MODEL / "weights/weights.bin").write_bytes(weights)
        (path / "kernels/generic/toy.so").write_bytes(toy_library.read_bytes())
        if tokenizer:
            (path / MODEL / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        seal(path)
        return path

    return make


def continuation(prompt: Sequence[int], count: int, *, eos: bool = True) -> list[int]:
    """What the toy model must answer."""
    tokens = list(prompt)
    for _ in range(count):
        value = 17
        for token in tokens:
            value = (value * 31 + token + 7) & 0xFFFFFFFF
        tokens.append(value % VOCAB)
        if eos and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def answer() -> Callable[..., list[int]]:
    return continuation


@pytest.fixture(scope="session")
def reseal() -> Callable[[Path], None]:
    return seal


@pytest.fixture(scope="session")
def machine() -> str:
    return platform.machine()
