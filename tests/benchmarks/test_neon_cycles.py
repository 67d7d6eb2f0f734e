"""Loops are found in machine code, and a static model estimates them."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from neon_cycles import estimate, find_loops, main, whole_tiles

DISASSEMBLY = """
0000000000001000 <gemm_linear_f32_2x1>:
    1000: 00 00 00 00  \tmov\tx0, #0
    1004: 00 00 00 00  \tldr\tq1, [x1], #16
    1008: 00 00 00 00  \tfmla\tv0.4s, v1.4s, v2.s[0]
    100c: 00 00 00 00  \tsubs\tx3, x3, #1
    1010: 00 00 00 00  \tb.ne\t0x1004 <gemm_linear_f32_2x1+0x4>
    1014: 00 00 00 00  \tfmla\tv0.4s, v1.4s, v2.s[0]
    1018: 00 00 00 00  \tfmla\tv3.4s, v1.4s, v4.s[0]
    101c: 00 00 00 00  \tcbnz\tx3, 0x1014 <gemm_linear_f32_2x1+0x14>
    1020: 00 00 00 00  \tadd\tx0, x0, #1
    1024: 00 00 00 00  \tcbnz\tx0, 0x1020 <gemm_linear_f32_2x1+0x20>
    1028: 00 00 00 00  \tb.eq\t0x1000 <gemm_linear_f32_2x1>
"""


def test_innermost_loops_that_multiply_are_found_and_whole_tiles_picked() -> None:
    one, two = find_loops(DISASSEMBLY)  # not the one without, nor the one around all
    assert one.body == ("ldr q1, [x1], #16", "fmla v0.4s, v1.4s, v2.s[0]", "subs x3, x3, #1")
    assert (one.multiplies, two.multiplies) == (1, 2)
    assert whole_tiles([one, two, two]) == {"2x1": [two]}


@pytest.mark.skipif(shutil.which("llvm-mca") is None, reason="llvm-mca is not installed")
def test_a_chain_of_sums_takes_longer_than_sums_apart() -> None:
    one, _ = find_loops(DISASSEMBLY)
    apart = one._replace(body=tuple(f"fmla v{i}.4s, v8.4s, v9.4s" for i in range(4)))
    chain = one._replace(body=("fmla v0.4s, v8.4s, v9.4s",) * 4)
    assert estimate(apart, "cortex-a57") < estimate(chain, "cortex-a57")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("llvm-mca") is None, reason="llvm-mca is not installed")
def test_every_tile_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--cpu", "cortex-a57"])
    rows = capsys.readouterr().out.splitlines()
    tiles = {row.split()[1] for row in rows[1:]}
    assert {tile.rstrip("*") for tile in tiles} == {"1x4", "2x3", "3x2", "6x1"}
    assert any(tile.endswith("*") for tile in tiles)  # what the rules choose
