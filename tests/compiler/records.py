"""Tuning records with values that a test cares nothing about."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dovetail.ir.tuning import HardwareKey, RecordSet, TuningRecord

HARDWARE = HardwareKey(
    arch="x86_64", isa=("avx2", "fma"), cpu="test", caches=(1, 2, 3), cores=1, abi=1
)
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def make_record(**fields: Any) -> TuningRecord:
    """Return a record of a good trial, but for `fields`."""
    usual: dict[str, Any] = {
        "target": "generic", "hardware": HARDWARE, "kernel": "k", "build": "b", "kind": "linear",
        "shape": {"n": 32, "k": 64, "m": 1}, "dtype": "f32", "threads": 1, "schedule": (0,) * 9,
        "status": "ok", "seconds": 2.0, "low": 1.0, "high": 3.0, "runs": 3, "rounds": 3,
        "reference": None, "cost": 0.5, "when": WHEN,
    }  # fmt: skip
    return TuningRecord(**usual | fields)


class TrustingRecords(RecordSet):
    """Records of real trials that count whatever else the machine does meanwhile."""

    def trusts(self, record: TuningRecord) -> bool:
        return True
