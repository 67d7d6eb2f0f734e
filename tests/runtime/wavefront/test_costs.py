"""What the control plane learns of costs."""

from __future__ import annotations

from math import sqrt

import pytest

from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.wavefront.costs import Learned, StageCosts, StepCost


def test_a_sub_stage_is_long_enough_to_pay_for_its_scan_however_quick_reports_are() -> None:
    scan = ScanCost(fixed=0.001, per_vector=1e-6)
    learned = Learned(StageCosts(scan=scan, overhead=0.002, step=StepCost(fixed=0.01)))
    learned.searched(1.0)
    assert learned.budget == pytest.approx(sqrt(2 * 0.003 * 1.0))
    for _ in range(200):  # reports come at once
        learned.scanned(0.05, 0.05, 0.05)
    assert learned.budget == pytest.approx(sqrt(2 * 0.001 * 1.0), rel=1e-3)
