"""A service that sizes its own queues: on a virtual clock exactly, on two real devices at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.profile import ProfileFile, ProfileKey
from dovetail.runtime.embed.depths import (
    Depths,
    depths_of,
    fixed_manager,
    make_manager,
    profile_rows,
)
from dovetail.runtime.embed.device_queue import QueryBatch
from dovetail.runtime.embed.devices import DevicePlan, EmbeddingPlan
from dovetail.runtime.embed.drift import DriftKeeper
from dovetail.runtime.embed.fit_latency import Calibrator
from dovetail.runtime.embed.line import FittedLine, Line, Point
from dovetail.runtime.embed.service import EmbeddingService
from dovetail.runtime.native.encoder import Ids
from dovetail.runtime.schedule.cost_tables import keep_profile, read_profile
from dovetail.runtime.sim.capacity import pair_plan
from tests.repository import ROOT
from tests.runtime.embed.integrity import held
from tests.runtime.embed.toy_encoders import Timed

sys.path.insert(0, str(ROOT / "benchmarks"))

from published_pairs import PAIRS, pair_depths

ONE = EmbeddingPlan((DevicePlan("npu", "npu"),), False)
CLASSES = (75, 150)


class Clock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def sample(count: int, length: int) -> Sequence[Ids]:
    return [np.full(length, 7, np.int32)] * count


@contextmanager
def one_device(line: Line, clock: Clock, **options: object) -> Iterator[EmbeddingService]:
    device = Timed(line, clock.sleep)
    manager = fixed_manager(ONE, 512, {"npu": 1})
    with EmbeddingService(
        {"npu": [{"": device}]}, manager, slo=1.0, now=clock.now, **options
    ) as made:  # type: ignore[arg-type]
        yield made


def test_a_service_finds_the_line_and_the_depth_of_its_device() -> None:
    clock = Clock()
    with one_device(Line(0.018, 0.27), clock) as service:
        calibrator = Calibrator(service, ONE, sample)
        depths = calibrator.size_queues(CLASSES, 1.0, "closed")
        short, long = depths.devices["npu"]
        assert (short.line.alpha, short.line.beta) == pytest.approx((0.018, 0.27), rel=1e-6)
        assert (long.line.alpha, long.line.beta) == pytest.approx((0.036, 0.27), rel=1e-6)
        assert (short.predicted, short.tested) == (40, 40)
        assert (long.predicted, long.tested) == (20, 20)
        assert service.manager.depths() == {"npu": (40, 20)}
        assert calibrator.run({"npu": 40}, 75)["npu"] == pytest.approx(0.99)
        again = calibrator.size_queues(CLASSES, 2.0, "open", stress=False)
        assert again.devices["npu"][0].depth == Line(0.018, 0.27).depth(2.0, "open")


class Optimistic(Calibrator):
    """Takes the device for twice as fast."""

    def profile(self, classes: Sequence[int], slo: float) -> dict[str, dict[int, FittedLine]]:
        return {"npu": {75: FittedLine(Line(0.009, 0.27), ())}}


def test_open_depths_keep_the_tested_part_of_the_closed_ones() -> None:
    clock = Clock()
    with one_device(Line(0.018, 0.27), clock) as service:
        depths = Optimistic(service, ONE, sample).size_queues((75,), 1.0, "open")
        found = depths.devices["npu"][0]
        assert found.predicted == Line(0.009, 0.27).depth(1.0, "open") == 51
        assert found.tested == 51 * 40 // 81


def _pair() -> Depths:
    depths = pair_depths(PAIRS["v100"], 1.0)
    devices = {
        name: (
            replace(
                each,
                fitted=FittedLine(each.line, (Point(1, 0.3),), error=0.01),
                tested=44 if name == "npu" else None,
            ),
        )
        for name, (each,) in depths.devices.items()
    }
    return replace(depths, devices=devices)


def test_two_real_devices_are_sized_side_by_side() -> None:
    plan = pair_plan()
    devices = {
        "npu": [{"": Timed(Line(0.0005, 0.002))}],
        "cpu": [{"": Timed(Line(0.002, 0.004))}],
    }
    manager = fixed_manager(plan, 512, {"npu": 1, "cpu": 1})
    with EmbeddingService(devices, manager, slo=0.05) as service:
        calibrator = Calibrator(service, plan, sample)
        depths = calibrator.size_queues((75,), 0.05, "closed")
        assert set(depths.devices) == {"npu", "cpu"}
        assert service.manager.depths() == {
            name: (classes[0].depth,) for name, classes in depths.devices.items()
        }
        assert held(service) == {"npu": 0, "cpu": 0}


def test_lines_and_tested_depths_outlive_the_process_in_the_profile(tmp_path: Path) -> None:
    depths = _pair()
    key = ProfileKey(model="m", device="d", threads=2, tensor_parallel=1, kernels="")
    rows = profile_rows(depths)
    keep_profile(tmp_path, ProfileFile(key=key, created="now", tables={}, latency=rows))
    read = read_profile(tmp_path, key)
    assert read is not None and read.latency == rows
    assert depths_of(pair_plan(), read.latency, 1.0).devices == depths.devices
    looser = depths_of(pair_plan(), read.latency, 2.0).devices["npu"][0]
    assert looser.tested is None and looser.depth > 80


def test_a_service_follows_a_device_that_becomes_slower() -> None:
    clock, believed = Clock(), Line(0.018, 0.27)
    depths = pair_depths(PAIRS["v100"], 1.0)
    one = Depths(1.0, "closed", {"npu": depths.devices["npu"]}, heterogeneous=False)
    keeper = DriftKeeper()
    with one_device(believed.scaled(2), clock, observe=keeper) as service:
        service.use(make_manager(ONE, one))
        keeper.keep(service, ONE, one)
        for size in [4, 8, 12] * 8:
            service.submit(sample(size, 75)).result()
        slower = believed.scaled(2).depth(1.0, "closed")
        while service.manager.depths()["npu"][0] != slower:  # on a thread of its own
            service.submit(sample(4, 75)).result()
        assert keeper.depths is not None
        assert keeper.depths.devices["npu"][0].line.alpha == pytest.approx(0.036, rel=0.05)


def test_observers_are_told_of_each_batch() -> None:
    seen: list[tuple[QueryBatch, float]] = []
    clock = Clock()
    with one_device(
        Line(0.01, 0.1), clock, observe=lambda batch, s: seen.append((batch, s))
    ) as service:
        service.use(fixed_manager(ONE, 75, {"npu": 8}))
        service.submit(sample(5, 75)).result()
    ((batch, seconds),) = seen
    assert batch.counts == (5,)
    assert seconds == pytest.approx(0.15)
