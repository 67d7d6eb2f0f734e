"""Targets: complete op tables, feature detection."""

import re

import pytest

from dovetail.codegen.targets import (
    ALL_TARGETS,
    DEVICE_TARGETS,
    TARGETS,
    best_target,
    get_target,
    parse_features,
    runs_on,
)
from dovetail.ir.errors import SpecError
from tests.codegen.float_targets import FLOATS_OF

EPYC = "processor\t: 0\nflags\t\t: fpu fma f16c avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd fphp\n"
SUMS_16 = {"vmul_quads", "vadd_i16", "vfold_i16"}
CPU_ONLY = re.compile(r"pair|quad|vload_[ui]8|vstore_i8|vreduce_add\d")


def best(machine: str, features: frozenset[str]) -> str:
    return best_target(machine, features).name


def test_all_targets_define_the_same_operations():
    keys = {name: set(target.ops) for name, target in ALL_TARGETS.items()}
    for name in DEVICE_TARGETS:  # panels are read in pairs and quads on CPUs, two at once here
        keys[name] |= {key for key in keys["generic"] if CPU_ONLY.search(key)}
        keys[name] -= {key for key in keys[name] if key.startswith("vload_strips")}
    for name, target in ALL_TARGETS.items():
        tiles = {key for key in keys[name] if key.startswith("tile")}
        assert bool(tiles) == target.tiles
        sums = keys[name] & SUMS_16
        assert sums == SUMS_16 or not (sums or target.sums_16)
        keys[name] -= tiles | sums
    assert len(set(map(frozenset, keys.values()))) == 1, keys


def test_targets_with_the_same_floats_differ_in_products_of_bytes_alone():
    for name, base in FLOATS_OF.items():
        one, other = TARGETS[name], TARGETS[base]
        differing = {key for key in one.ops if one.ops[key] != other.ops[key]}
        assert differing and all(key.startswith("vdot_quads") for key in differing)
        assert (one.lanes, one.isa, one.prelude) == (other.lanes, other.isa, other.prelude)
        assert one.cpu_features > other.cpu_features
    for target in TARGETS.values():
        assert (target.quads == "wide") == any(
            word in target.ops["vdot_quads"] for word in ("dpbusd", "usdot")
        )


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_operations_call_only_intrinsics_and_helpers_of_the_target(name):
    target = ALL_TARGETS[name]
    libm = {"fabsf", "sqrtf", "rintf", "floorf", "ceilf", "truncf"}
    for key, text in target.ops.items():
        for called in re.findall(r"([A-Za-z_]\w*)\(", text):
            known = called in target.intrinsics or called in target.prelude or called in libm
            assert known, f"{key}: {called}"


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_prelude_functions_come_with_what_they_call(name):
    target = ALL_TARGETS[name]
    for helper in target.prelude:
        names = [f.name for f in target.prelude_functions([helper])]
        assert names[-1] == helper
        for function in target.prelude_functions([helper]):
            assert target.prelude_functions([function.name])[-1] == function


def test_host_features_pick_the_best_target():
    assert best("x86_64", parse_features(EPYC)) == "x86-64-avx2"
    assert best("x86_64", TARGETS["x86-64-avx512"].cpu_features) == "x86-64-avx512"
    amx = TARGETS["x86-64-amx"]
    assert best("x86_64", amx.cpu_features) == amx.name
    bf16 = TARGETS["x86-64-avx512bf16"]
    assert best("x86_64", bf16.cpu_features) == bf16.name
    assert best("x86_64", bf16.cpu_features | bf16.slow_flags) == "x86-64-avx512vnni"
    assert best("x86_64", frozenset()) == "generic"
    assert best("aarch64", parse_features(GRAVITON)) == "aarch64-neon"
    for name in ("x86-64-avxvnni", "x86-64-avx512vnni", "aarch64-dotprod", "aarch64-i8mm"):
        assert best(TARGETS[name].machine, TARGETS[name].cpu_features) == name
    assert best("riscv64", frozenset()) == "generic"
    assert parse_features("nothing here") == frozenset()


def test_no_cpu_runs_a_device_target():
    for name, target in DEVICE_TARGETS.items():
        assert target.device and name not in TARGETS
        assert get_target(name) is target
        assert not runs_on(target, "x86_64", frozenset())


def test_unknown_target_lists_the_known_ones():
    with pytest.raises(SpecError, match="x86-64-avx2"):
        get_target("sparc")
