"""The executor for GPUs on an emulated one, that of `tests/lazy_gpu.py`: loads, tokens, plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dovetail.codegen.catalog import device_kernels
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.compiler.pipeline import compile_model
from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.app import App
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.cuda import CudaDevice
from dovetail.runtime.cuda_engine import CudaEngine, CudaOptions
from dovetail.runtime.cuda_lane import CudaLane
from dovetail.runtime.cuda_pair import GpuParts
from dovetail.runtime.encoder_texts import Embeddings
from dovetail.runtime.generator import Generator
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.machines import find_machine
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.plan import Batch, SchedulerSettings, StepPlan
from dovetail.runtime.skinny_products import Compare
from dovetail.topology.hardware import read_hardware
from tests.codegen.warp_host import FLAGS
from tests.cuda_rank import DRIVER, INDEX, clock_worker
from tests.emulated_gpu import build_driver, make_index
from tests.lazy_gpu import HostProducts, HostSums, LazyDriver, prefer_ours
from tests.models import save_model
from tests.runtime.test_pipelined import PROMPTS as LONGER

CUDA = DEVICE_TARGETS["cuda"]
PROMPTS = [*LONGER[1:6], *LONGER[10:]]
ASKED = {"max_tokens": 12, "ignore_eos": True}


class Gpu:
    """An artifact and an emulated GPU that has its kernels."""

    def __init__(self, folder: Path, family: str = "llama") -> None:
        save_model(folder / "model", family)
        options = {
            "effort": "none",
            "max_step_tokens": 64,
            "max_context": 256,
            "weight_dtype": "f32",
        }
        compile_model(folder / "model", output=folder / "app.dove", **options)
        self.artifact = open_artifact(folder / "app.dove", read_hardware())
        self.part = next(iter(self.artifact.models.values()))
        requests = device_kernels(self.part.file.spec, CUDA)
        kernels = [lower_request(r, CUDA) for r in requests]
        self.library = build_driver(kernels, flags=FLAGS)
        self.kernels = {kernel.entry.name: kernel.entry for kernel in kernels}
        self.module = folder / "k.ptx", make_index(kernels)
        self.module[0].write_text("emulated")
        self.folder = folder  # from which other ranks take the same
        (folder / INDEX).write_bytes(msgspec.json.encode(self.module[1]))
        (folder / DRIVER).symlink_to(self.library)

    @contextmanager
    def load(
        self,
        gpu: int,
        cpu: int,
        *,
        eager: bool = False,
        landing: int | None = None,
        graphs: bool = True,
        ranks: int = 1,
        profile: ProfileFile | None = None,
        compare: Compare | None = prefer_ours,
        **options: Any,
    ) -> Iterator[Running]:
        """Load with pools of so many blocks; nothing is left of it on the GPU."""
        driver = LazyDriver(self.library, self.kernels, eager=eager)
        before = driver._c.dt_left()
        products: list[HostProducts] = []

        def make(weights: Any, ordinal: int) -> HostProducts:
            products.append(HostProducts(driver, weights, ordinal))
            return products[0]

        device = CudaDevice(driver=driver)
        parts = GpuParts(device, self.module, make, HostSums, landing, compare)
        machine = find_machine("t4").with_gpu_blocks(gpu)
        chosen = CudaOptions(machine, SchedulerSettings(**options), profile, graphs=graphs)
        engine = CudaEngine(
            chosen,
            self.artifact,
            self.part,
            read_hardware(),
            plan=plan(ranks) if ranks > 1 else None,
            ranks=RankOptions(backend="gloo"),
            threads=1,
            kv_blocks=cpu,
            parts=parts,
        )
        clock_worker(engine.pair, driver)
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
        generator = Generator(EngineLoop(engine), None, self.artifact.path, 256)
        with App(self.artifact, generator, Embeddings(self.artifact.path, {})) as app:
            yield Running(app, engine, driver, products[0], plans)
            for pool in engine.scheduler.pools.values():
                pool.check_integrity()
                assert pool.free_blocks == pool.n_blocks
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


def plan(processes: int) -> ServicePlan:
    phase = PhasePlan(threads=1, cpus=())
    return ServicePlan(processes=processes, prefill=phase, decode=phase)
