"""Every x86 intrinsic's numpy meaning equals the compiled instruction, bit for bit, on this CPU."""

import platform

import pytest

from dovetail.codegen.targets import TARGETS, host_features, runs_on
from tests.codegen.isa_probe import check_table

BESIDE = {
    "x86-64-avx2": "generic",
    "x86-64-avx512": "x86-64-avx2",
    "x86-64-avxvnni": "x86-64-avx2",
    "x86-64-avx512vnni": "x86-64-avx512",
    "x86-64-avx512bf16": "x86-64-avx512vnni",
}
"""Target to the one whose instructions need no second check."""


@pytest.mark.parametrize("name", BESIDE)
def test_meanings_equal_the_instructions(name, tmp_path):
    target = TARGETS[name]
    if not runs_on(target, platform.machine(), host_features()):
        pytest.skip(f"this CPU does not run {name}")
    known = TARGETS[BESIDE[name]].intrinsics
    rows = [row for row in target.intrinsics.values() if row.name not in known]
    assert rows and not check_table(target, rows, tmp_path)
