"""The targets by name, which of them this machine runs, and the chain to fall back along."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

from dovetail.codegen.isa import amx, avx2, avx512, cuda, generic, neon
from dovetail.codegen.isa.neon_dots import DOTPROD, I8MM
from dovetail.codegen.isa.target import Target
from dovetail.codegen.isa.x86_dots import AVX512_BF16, AVX512_VNNI, AVXVNNI
from dovetail.ir.cpu import forced_target, usable_flags
from dovetail.ir.errors import SpecError

_X86 = (amx.TARGET, AVX512_BF16, AVX512_VNNI, avx512.TARGET, AVXVNNI, avx2.TARGET)
_CPUS = (*_X86, I8MM, DOTPROD, neon.TARGET, generic.TARGET)
TARGETS: dict[str, Target] = {target.name: target for target in _CPUS}
"""Targets of CPUs, best first."""

DEVICE_TARGETS: dict[str, Target] = {cuda.TARGET.name: cuda.TARGET}
"""Targets of accelerators: kernels lower, are built and interpreted; CPUs do not run them."""

ALL_TARGETS: dict[str, Target] = {**TARGETS, **DEVICE_TARGETS}


def get_target(name: str) -> Target:
    """Return the target called `name`; SpecError that lists all targets if there is none."""
    if name not in ALL_TARGETS:
        raise SpecError(f"unknown target {name!r}; choose one of {', '.join(ALL_TARGETS)}")
    return ALL_TARGETS[name]


@lru_cache
def host_features() -> frozenset[str]:
    """Return what this process may use of its CPU's features, as /proc/cpuinfo spells them.

    Empty where that cannot be read.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    return usable_flags(parse_features(text))


def parse_features(cpuinfo: str) -> frozenset[str]:
    """Return the flags of the first CPU in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def runs_on(target: Target, machine: str, features: frozenset[str]) -> bool:
    """Return whether a CPU of that machine (as `uname -m`) and features runs the target."""
    return target.machine in ("", machine) and target.cpu_features <= features


def host_target() -> Target:
    """Return the target that DOVETAIL_TARGET names, else the best one that this machine runs.

    Raises SpecError where the name is none of a target that this machine runs.
    """
    return target_for(platform.machine(), host_features())


def target_for(machine: str, features: frozenset[str]) -> Target:
    """Return the forced target, as `host_target`, else the best one of a CPU."""
    forced = forced_target(
        TARGETS, lambda name: runs_on(TARGETS[name], platform.machine(), host_features())
    )
    return best_target(machine, features) if forced is None else TARGETS[forced]


def best_target(machine: str, features: frozenset[str]) -> Target:
    """Return the first target that a CPU of that machine and features runs, and not slowly."""
    fast = (t for t in TARGETS.values() if not t.slow_flags & features)
    return next(t for t in fast if runs_on(t, machine, features))
