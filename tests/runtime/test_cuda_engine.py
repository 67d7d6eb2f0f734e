"""The executor for a GPU gives the tokens of the CPU's, its work ordered by events alone.

The GPU is emulated (`tests/lazy_gpu.py`): generated kernels as C++, torch's products on the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.codegen.catalog import device_kernels
from dovetail.codegen.emit import KernelSpec
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS, host_target
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, SpecError
from dovetail.runtime.app import App, load
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.cuda import CudaDevice, count_devices
from dovetail.runtime.cuda_engine import CudaEngine, CudaOptions, GpuParts
from dovetail.runtime.cuda_lane import CudaLane
from dovetail.runtime.encoder_texts import Embeddings
from dovetail.runtime.generator import Generator
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.machines import find_machine
from dovetail.runtime.neo import NeoScheduler
from dovetail.runtime.plan import Batch, SchedulerSettings, StepPlan
from dovetail.runtime.request import Request
from dovetail.runtime.scheduler import Draft
from dovetail.topology.hardware import read_hardware
from tests.codegen.warp_host import FLAGS
from tests.emulated_gpu import build_driver
from tests.lazy_gpu import ClockedWorker, HostProducts, LazyDriver, Race
from tests.models import save_model
from tests.runtime.test_pipelined import HOMES
from tests.runtime.test_pipelined import PROMPTS as LONGER

CUDA = DEVICE_TARGETS["cuda"]
PROMPTS = [*LONGER[1:6], *LONGER[10:]]
ASKED = {"max_tokens": 12, "ignore_eos": True}
MORE = pytest.mark.long


class Gpu:
    """An artifact and an emulated GPU that has its kernels."""

    def __init__(self, folder: Path, family: str = "llama") -> None:
        save_model(folder / "model", family)
        options = {"effort": "none", "max_step_tokens": 64, "max_context": 256}
        compile_model(folder / "model", output=folder / "app.dove", **options)
        self.artifact = open_artifact(folder / "app.dove", read_hardware())
        self.part = next(iter(self.artifact.models.values()))
        requests = device_kernels(self.part.file.spec, CUDA)
        kernels = [lower_request(r, CUDA) for r in requests if "gemm" not in r.kernel]
        self.library = build_driver(kernels, flags=("-O1", *FLAGS[1:]))
        self.kernels = {kernel.entry.name: kernel.entry for kernel in kernels}
        self.module = folder / "k.ptx", make_index(kernels)
        self.module[0].write_text("emulated")

    @contextmanager
    def load(
        self,
        gpu: int,
        cpu: int,
        *,
        eager: bool = False,
        landing: int | None = None,
        graphs: bool = True,
        **options: Any,
    ) -> Iterator[Running]:
        """Load with pools of so many blocks; nothing is left of it on the GPU."""
        driver = LazyDriver(self.library, self.kernels, eager=eager)
        before = driver._c.dt_left()
        products: list[HostProducts] = []

        def make(weights: Any, ordinal: int) -> HostProducts:
            products.append(HostProducts(driver, weights, ordinal))
            return products[0]

        parts = GpuParts(CudaDevice(driver=driver), self.module, make, landing)
        machine = find_machine("t4").with_gpu_blocks(gpu)
        chosen = CudaOptions(machine, SchedulerSettings(**options), graphs=graphs)
        engine = CudaEngine(
            chosen,
            self.artifact,
            self.part,
            read_hardware(),
            threads=1,
            kv_blocks=cpu,
            parts=parts,
        )
        engine._worker.shutdown()
        engine._worker = ClockedWorker(driver)
        plans: list[StepPlan] = []
        execute = engine._execute

        def follow(plan: StepPlan) -> Any:
            plan = replace(plan, batches=in_two(plan.batches))
            plans.append(plan)
            touched = execute(plan)
            engine.scheduler.check_integrity()
            return touched

        engine._execute = follow  # type: ignore[method-assign]
        for lane in engine.lanes:
            note_host(lane, driver)
        generator = Generator(EngineLoop(engine), None, self.artifact.path)
        with App(self.artifact, generator, Embeddings(self.artifact.path, {})) as app:
            yield Running(app, engine, driver, products[0], plans)
            for pool in engine.scheduler.pools.values():
                pool.check_integrity()
                assert pool.free_blocks == pool.n_blocks
        engine._worker.shutdown()
        assert driver._c.dt_left() == before


class Running:
    """A loaded app and what there is to see of it."""

    def __init__(
        self,
        app: App,
        engine: CudaEngine,
        driver: LazyDriver,
        products: HostProducts,
        plans: list[StepPlan],
    ) -> None:
        self.app, self.engine, self.driver = app, engine, driver
        self.products, self.plans = products, plans

    def tokens(self, prompts: list[list[int]], **asked: Any) -> list[tuple[int, ...]]:
        return [done.token_ids for done in self.app.generate(prompts, **(ASKED | asked))]


def in_two(batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """Return a step of one batch with two decodes on the CPU as two batches, like NEO's."""
    if len(batches) != 1 or len(batches[0].cpu_decode) < 2:
        return batches
    decodes = batches[0].cpu_decode
    return replace(batches[0], cpu_decode=decodes[::2]), Batch(cpu_decode=decodes[1::2])


def make_index(kernels: list[KernelSpec]) -> KernelIndex:
    entries = tuple(kernel.entry for kernel in kernels)
    return KernelIndex(
        target="cuda", library="k.ptx", source="k.cu", compiler="c", flags=(), kernels=entries
    )


def note_host(lane: CudaLane, driver: LazyDriver) -> None:
    """Have the ledger know what the host's threads touch."""
    fill, pad, store, attend = lane.fill, lane.pad, lane._store, lane._attend
    given = [a for n, a in lane.buffers.arrays.items() if n not in ("logits", "out_ids")]
    qkv, attention = (lane._rows[name][1] for name in ("qkv", "attention"))

    def follow_fill(*args: Any) -> Any:
        driver.host("fill", writes=given)
        return fill(*args)

    def follow_pad(rows: int) -> Any:
        driver.host("pad", writes=[a[:0] for a in given])
        return pad(rows)

    def follow_store(layer: int) -> None:
        kv = lane._model.cpu.kv
        size = lane._model.pools.block_bytes
        starts = [layer * kv.layer_bytes + int(s) // 16 * size for s in lane._cpu_slots]
        blocks = [pool[at : at + size] for at in starts for pool in (kv.k, kv.v)]
        row_bytes = lane._rows["qkv"][2]
        driver.host("store", reads=[qkv[: lane._decodes * row_bytes]], writes=blocks)
        store(layer)

    def follow_attend(layer: int, arrived: int) -> None:
        attend(layer, arrived)
        driver.host("attend", writes=[attention[: lane._decodes * lane._rows["attention"][2]]])

    lane.fill, lane.pad = follow_fill, follow_pad  # type: ignore[method-assign]
    lane._store, lane._attend = follow_store, follow_attend  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    return Gpu(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def alone(gpu: Gpu) -> list[tuple[int, ...]]:
    """What the CPU's engine generates."""
    with load(gpu.artifact.path, kv_blocks=200) as app:
        return [done.token_ids for done in app.generate(PROMPTS, **ASKED)]


@pytest.mark.parametrize(
    ("offload", "blocks", "cpu", "chunked", "eager"),
    [
        ("off", 9, 1, False, True),
        ("full", 1, 7, True, False),
        ("auto", 7, 7, False, False),
        pytest.param("off", 200, 1, True, False, marks=MORE),
        pytest.param("full", 1, 200, False, False, marks=MORE),
        pytest.param("auto", 3, 12, True, True, marks=MORE),
        pytest.param("auto", 12, 60, True, False, marks=MORE),
    ],
)
def test_the_tokens_are_those_of_the_cpu(
    gpu: Gpu,
    alone: list[tuple[int, ...]],
    offload: str,
    blocks: int,
    cpu: int,
    chunked: bool,
    eager: bool,
) -> None:
    settings = {"offload": offload, "chunked": chunked, "min_gain": 0.0, "patience": 4}
    with gpu.load(blocks, cpu, eager=eager, **settings) as running:
        assert running.tokens(PROMPTS) == alone
    plans = running.plans
    decoded = {name: any(getattr(b, name) for p in plans for b in p.batches) for name in HOMES}
    if offload != "auto":
        assert decoded == {"gpu_decode": offload == "off", "cpu_decode": offload == "full"}
    if offload == "full":
        assert any(len(plan.batches) == 2 for plan in plans)
    if (offload, blocks) == ("off", 9):
        assert any(plan.preempt for plan in plans)
    assert running.driver.ledger.checked > 1000


def test_swaps_both_ways_and_graphs_are_run(
    gpu: Gpu, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evict = NeoScheduler.evict

    def move(scheduler: NeoScheduler, draft: Draft, victim: Request) -> None:
        with monkeypatch.context() as always:
            always.setattr(NeoScheduler, "_belongs_to_cpu", lambda *_: True)
            evict(scheduler, draft, victim)

    monkeypatch.setattr(NeoScheduler, "evict", move)  # those that give way move
    seen = dict.fromkeys(("out", "in", "later", "graphs"), 0)
    for blocks, cpu, gain in ((8, 60, 0.0), (9, 30, 9.0)):
        with gpu.load(blocks, cpu, min_gain=gain, patience=4) as running:
            assert running.tokens(PROMPTS) == alone
        plans = running.plans
        seen["out"] += sum(len(plan.swap_out) for plan in plans)
        seen["in"] += sum(len(plan.swap_in) for plan in plans)
        seen["later"] += sum(c.start > 0 for p in plans for b in p.batches for c in b.prefill)
        seen["graphs"] += running.driver.counts.get("cuGraphLaunch", 0)
    assert min(seen.values()) > 0, seen


def test_prompts_of_the_cpu_land_in_turns_where_room_is_short(
    gpu: Gpu, alone: list[tuple[int, ...]]
) -> None:
    with gpu.load(1, 60, offload="full", landing=6) as running:
        rounds: list[int] = []
        split = running.engine._rounds

        def follow(plan: StepPlan) -> Any:
            found = split(plan)
            rounds.append(len(found))
            return found

        running.engine._rounds = follow  # type: ignore[method-assign]
        assert running.tokens(PROMPTS, max_tokens=2) == [t[:2] for t in alone]
    assert max(rounds) > 1


def test_work_that_no_event_orders_is_found(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the events between streams, or without waiting for a copy, the ledger objects."""
    settings = {"offload": "full", "chunked": False}
    with gpu.load(1, 60, **settings) as running:
        streams = running.engine.gpu.streams
        monkeypatch.setattr(type(streams), "follow", lambda *_: None)
        with pytest.raises((Race, RuntimeError, DeviceError)):
            running.tokens(PROMPTS[:3])
        monkeypatch.undo()


def test_a_request_that_the_gpu_has_no_memory_for_fails_alone(
    gpu: Gpu, alone: list[tuple[int, ...]]
) -> None:
    longest = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    most = len(PROMPTS[longest])
    with gpu.load(60, 40, min_gain=0.0, chunked=False) as running:

        def refuse(rows: int) -> Exception | None:
            requests = running.engine.scheduler.requests
            for batch in running.plans[-1].batches:
                found = (requests.get(chunk.request) for chunk in batch.prefill)
                if any(r and len(r.tokens) == most for r in found) and rows == batch.tokens:
                    return CapacityError("no room")
            return None

        running.products.fail = refuse
        jobs = [running.app.submit(prompt, **ASKED) for prompt in PROMPTS]
        with pytest.raises(DeviceError, match="out of memory for a request"):
            jobs[longest].result()
        for i, job in enumerate(jobs):
            if i != longest:
                assert job.result().token_ids == alone[i]


def test_logprobs_and_samples_are_those_of_the_cpu(gpu: Gpu) -> None:
    asked = {"max_tokens": 4, "logprobs": 3, "temperature": 0.8, "seed": 5, "top_k": 20}
    with load(gpu.artifact.path, kv_blocks=40) as app:
        (want,) = app.generate([PROMPTS[3]], **asked)
    with gpu.load(20, 20) as running:
        (got,) = running.app.generate([PROMPTS[3]], **asked)
    assert got.token_ids == want.token_ids
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_what_cannot_be_put_on_a_gpu(gpu: Gpu) -> None:
    chosen = CudaOptions(find_machine("t4"))
    with pytest.raises(SpecError, match="deterministic"):
        load(gpu.artifact.path, cuda=chosen, deterministic=True)
    with pytest.raises(ArtifactError, match="--target cuda"):
        load(gpu.artifact.path, cuda=chosen)
    with pytest.raises(CapacityError, match="out of memory"), gpu.load(1 << 40, 4):
        pass
    gc.collect()


@pytest.mark.skipif(not count_devices(), reason="no NVIDIA GPU is at hand")
def test_a_real_gpu_gives_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    options = {"effort": "none", "max_step_tokens": 64, "max_context": 256}
    targets = ("cuda", host_target().name)
    path = tmp_path / "app.dove"
    compile_model(tmp_path / "model", output=path, targets=targets, **options)
    with load(path, kv_blocks=200) as app:
        want = [done.token_ids for done in app.generate(PROMPTS, **ASKED)]
    for offload, blocks in (("off", 40), ("auto", 9), ("full", 1)):
        chosen = CudaOptions(
            find_machine("h200").with_gpu_blocks(blocks), SchedulerSettings(offload=offload)
        )
        with load(path, kv_blocks=60, cuda=chosen) as app:
            assert [done.token_ids for done in app.generate(PROMPTS, **ASKED)] == want
