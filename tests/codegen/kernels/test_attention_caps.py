"""Capped scores against float64: kernels of prompts, of decodes, and those made for their heads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from dovetail.codegen.catalog import CAPPED, HeadShape, kernel_request
from dovetail.codegen.targets import host_target
from tests.codegen.kernels import test_attention_decode as decode
from tests.codegen.kernels import test_attention_prefill as prefill
from tests.codegen.kernels.harness import Runner, compiled_runner

CAP = 3
"""Small enough that all scores change."""
ANY, MADE = HeadShape(32, 3, cap=CAP), HeadShape(64, 2, cap=CAP)
"""The tiles of the second are unrolled where there are vectors."""


@cache
def runner() -> Runner:
    """Return the kernels of the best target of this machine."""
    target = host_target()
    asked = [kernel_request(family, target, "f32", ANY) for family in CAPPED]
    asked.append(kernel_request("decode_attention_merge", target, "f32"))
    made = kernel_request("decode_attention", target, "f32", MADE)
    return compiled_runner(target, (*asked, replace(made, name=f"made_f32_cap{CAP}")))


@pytest.mark.parametrize("window", [0, 40])
def test_scores_of_prompts_are_capped(window: int) -> None:
    rows, lengths = [41, 1, 130], [41, 90, 150]
    prefill.check(runner(), "f32", (6, 2), 32, rows, lengths, window, nth=2, cap=CAP)


def test_bits_do_not_depend_on_how_a_prompt_is_cut() -> None:
    prefill.check_cuts(runner(), f"f32_cap{CAP}", 30, 2e-5, cap=CAP)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("kernel", "heads"), [("decode_attention", ANY), ("made", MADE)])
def test_scores_of_decodes_are_capped(kernel: str, heads: HeadShape, window: int) -> None:
    lengths, groups = [1, 15, 17, 90, 144, 300], (2 * heads.group, 2)
    options = {"splits": 2, "nth": 2, "cap": CAP, "kernel": kernel}
    decode.check(runner(), "f32", groups, heads.head_dim, lengths, window, **options)
