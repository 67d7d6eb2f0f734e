"""An emulated accelerator on the wall clock beside this CPU's real attention: does it overlap?

The accelerator sleeps the seconds of an assumed T4 with Llama-2-7B; decode attention runs by the
generated kernels over KV of that model's heads, in fewer layers and blocks, as this memory allows.
Its times are measured first, with the same kernels; the steps are compared with what they predict.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

import dovetail
from common import timed_region
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.ir.profile import CostRow, ProfileFile
from dovetail.runtime.app import load
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.machines import find_machine, kv_token_bytes
from dovetail.runtime.plan import Offload, SchedulerSettings
from dovetail.runtime.profiler import measure_profile, profile_key
from dovetail.runtime.request import SamplingParams
from dovetail.runtime.scenario import synthesize
from dovetail.runtime.timed import TimedEngine, TimedStep
from dovetail.topology.hardware import read_hardware
from dovetail.topology.presets import preset_model
from generate_models import SHAPES, write_checkpoint

GROUP = "emulated"
MACHINE = "t4"
LAYERS, MODEL_LAYERS = 16, 32
"""Those whose KV is held (5 GB), and those of the model. A step is planned, and its first attention
awaited, once: both weigh four times as much in 8 layers as in 32. With 8 the accelerator was
idle for 6.8 to 7.2 % of the time, which missed the bound of 5 %, before 16 were chosen."""
CPU_BLOCKS = 1200
THREADS = 1
REQUESTS, PROMPT, OUTPUT = 32, 330, 45
"""NEO's setting for the T4, with fewer requests."""
PROFILE_SECONDS = 20.0
LAUNCHES = 50
STORES, STORED = 50, 8
"""Times that so many sequences' keys and values are stored."""
SHAPES["7b-heads"] = {  # what is loaded: the KV of Llama-2-7B, and next to no weights
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}


def measure_emulated(scale: float, seed: int) -> list[dict[str, Any]]:
    """Return a row for each policy, with the setting; `scale` cuts the number of requests."""
    model = msgspec.structs.replace(
        preset_model("llama-2-7b", kv_dtype="bf16"), n_layers=LAYERS, max_context=1024
    )
    count = max(6, round(REQUESTS * scale))
    with tempfile.TemporaryDirectory() as folder:
        path = _compile(Path(folder))
        profile = _profile(path)
        rows = [_run(path, policy, profile, model, count, seed) for policy in ("off", "auto")]
    largest = profile.tables["cpu_decode"][-1]
    setting = {
        "label": "emulated",
        "model": "llama-2-7b",
        "layers": f"{LAYERS} of {MODEL_LAYERS}",
        "cpu_pool_bytes": CPU_BLOCKS * KV_BLOCK * LAYERS * kv_token_bytes(model),
        "cpu_blocks": f"{CPU_BLOCKS} of {find_machine(MACHINE).cpu_blocks}",
        "threads": THREADS,
        "cpu_bandwidth": largest.at[1] * kv_token_bytes(model) / largest.seconds,
        "launch": profile.tables["launch"][0].seconds,
    }
    return [row | setting for row in rows]


def summarize_emulated(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the rows; what was never seen has none."""
    if not rows:
        return {}
    off, auto = (next(row for row in rows if row["policy"] == name) for name in ("off", "auto"))
    found = {"emulated_auto_vs_gpuonly": auto["rate"] / off["rate"]}
    names = ("idle_fraction", "idle_fraction_planned", "vs_two_max", "vs_two_max_measured")
    for name in (*names, "host_fraction"):
        if auto[name] is not None:
            found[f"emulated_{name}"] = auto[name]
    return found


def _compile(folder: Path) -> Path:
    write_checkpoint(folder / "model", "7b-heads", "bf16", 0)
    dovetail.compile(
        folder / "model",
        output=folder / "app.dove",
        effort="none",
        kv_dtype="bf16",
        max_step_tokens=find_machine(MACHINE).step_tokens,
        max_step_sequences=64,
        max_context=1024,
    )
    return folder / "app.dove"


def _profile(path: Path) -> ProfileFile:
    """Measure this CPU's attention, what its new keys and values take to store, and its start.

    One device stores them beside its products; here the CPU does, in cold pages, before it attends.
    """
    with load(path, threads=THREADS, kv_blocks=CPU_BLOCKS) as app:
        key = profile_key(app.artifact, app.engine, read_hardware())
        found = measure_profile(app.engine, key, PROFILE_SECONDS, ("cpu_decode",))
    start = CostRow(at=(), seconds=_measure_launch(path), origin="measured")
    store = _measure_store(path)
    attention = tuple(
        msgspec.structs.replace(row, seconds=row.seconds + row.at[0] * store)
        for row in found.tables["cpu_decode"]
    )
    tables = {**found.tables, "cpu_decode": attention, "launch": (start,)}
    return msgspec.structs.replace(found, tables=tables)


def _measure_store(path: Path) -> float:
    """Return the seconds to store the new key and value of a sequence in one layer of the pool."""
    made = Emulation(find_machine(MACHINE), timed=True)
    with load(path, threads=THREADS, kv_blocks=CPU_BLOCKS, emulation=made) as app:
        engine = app.engine
        assert isinstance(engine, TimedEngine)
        places = np.random.default_rng(0).permutation(CPU_BLOCKS * KV_BLOCK)
        times = []
        for number in range(STORES):
            slots = places[number * STORED : (number + 1) * STORED]
            start = engine.accelerator.now()
            for layer in range(LAYERS):
                engine.link.send(layer, slots)
            times.append((engine.accelerator.now() - start) / (LAYERS * STORED))
    return statistics.median(times)


def _measure_launch(path: Path) -> float:
    """Return the seconds by which attention begins late, behind the accelerator's work."""
    made = Emulation(find_machine(MACHINE), timed=True)
    with load(path, threads=THREADS, kv_blocks=1, emulation=made) as app:
        assert isinstance(app.engine, TimedEngine)
        device, times = app.engine.accelerator, []
        for _ in range(LAUNCHES):
            due = device.queue(1e-3)[1]
            device.wait(device.event())
            times.append(device.now() - due)
    return statistics.median(times)


def _run(
    path: Path, policy: str, profile: ProfileFile, model: ModelSpec, count: int, seed: int
) -> dict[str, Any]:
    settings = SchedulerSettings(offload=cast("Offload", policy))
    made = Emulation(find_machine(MACHINE), settings, measured=profile, model=model, timed=True)
    seen: list[tuple[TimedStep, float]] = []
    with load(path, threads=THREADS, kv_blocks=CPU_BLOCKS, emulation=made) as app:
        engine = app.engine
        assert isinstance(engine, TimedEngine)
        for number, arrival in enumerate(synthesize(PROMPT, OUTPUT, count, seed=seed)):
            prompt = [1 + number % 200] * arrival.prompt
            engine.submit(prompt, SamplingParams(max_tokens=arrival.output, ignore_eos=True))
        host = time.thread_time()
        with timed_region() as region:
            while engine.scheduler.busy:
                start = time.perf_counter()
                engine.step()
                assert engine.last_step is not None
                seen.append((engine.last_step, time.perf_counter() - start))
        host = time.thread_time() - host
    row = {"group": GROUP, "machine": MACHINE, "policy": policy, "requests": count}
    row |= {"rate": count / region.seconds, "others": region.others}
    host -= sum(step.attending for step, _ in seen)
    return row | {"host_fraction": host / region.seconds} | judge_steps(seen)


def judge_steps(seen: Sequence[tuple[TimedStep, float]]) -> dict[str, Any]:
    """Return how steps compare with the formula, and how idle the accelerator was.

    `seen` has the whole seconds of each step, scheduling included. Only steps with decodes on the
    CPU count. `vs_two_max` is by the tables, `vs_two_max_measured` by what attention took in that
    very step. Idle time is that of steps in which both inequalities held: `idle_fraction` where
    they did when it was run, `idle_fraction_planned` where the tables said so, other work or not.
    """
    beside = [(s, whole) for s, whole in seen if any(b.cpu_decode for b in s.plan.batches)]
    planned = [(s, whole) for s, whole in beside if not s.plan.forced]
    held = [(s, w) for s, w in beside if all(t.cpu <= t.gpu for t in s.measured.stages)]
    return {
        "steps": len(seen),
        "steps_beside": len(beside),
        "steps_planned": len(planned),
        "steps_held": len(held),
        "two_batch": sum(len(s.plan.batches) > 1 for s, _ in seen),
        "vs_two_max": _median([s.seconds / s.told.two_max for s, _ in beside]),
        "vs_two_max_measured": _median([s.seconds / s.measured.two_max for s, _ in beside]),
        "attention_vs_table": _median([s.measured.cpu / s.told.cpu for s, _ in beside]),
        "idle_fraction": _idle(held),
        "idle_fraction_planned": _idle(planned),
    }


def _idle(steps: Sequence[tuple[TimedStep, float]]) -> float | None:
    passed = sum(whole for _, whole in steps)
    return 1 - sum(step.told.gpu for step, _ in steps) / passed if steps else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
