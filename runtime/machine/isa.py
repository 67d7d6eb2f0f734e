"""Which of an artifact's instruction-set targets this machine can run.

In: target names and a HardwareSpec. Out: the most capable target that fits, or an ArtifactError.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.ir.cpu import FORCED_TARGET, TILE_FLAGS, forced_target
from dovetail.ir.errors import ArtifactError
from dovetail.topology.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a target needs: the machine (None = the one it was compiled on) and CPU flags.

    CPUs with one of the `slow` flags run the target `faster`, which needs no more, faster.
    """

    arch: str | None
    flags: frozenset[str]
    slow: frozenset[str] = frozenset()
    faster: str = ""


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_FP16 = frozenset({"avx512_fp16"}), "x86-64-avx512vnni"  # see `slow` and `faster`

REQUIREMENTS: dict[str, Requirement] = {
    "x86-64-amx": Requirement("x86_64", _VNNI | TILE_FLAGS),
    "x86-64-avx512bf16": Requirement("x86_64", _VNNI | {"avx512_bf16"}, *_FP16),
    "x86-64-avx512vnni": Requirement("x86_64", _VNNI),
    "x86-64-avx512": Requirement("x86_64", _AVX512),
    "x86-64-avxvnni": Requirement("x86_64", _AVX2 | {"avx_vnni"}),
    "x86-64-avx2": Requirement("x86_64", _AVX2),
    "aarch64-i8mm": Requirement("aarch64", frozenset({"asimd", "asimddp", "i8mm"})),
    "aarch64-dotprod": Requirement("aarch64", frozenset({"asimd", "asimddp"})),
    "aarch64-neon": Requirement("aarch64", frozenset({"asimd"})),
    "generic": Requirement(None, frozenset()),
}
"""Known targets, most capable first; flags are spelled as in /proc/cpuinfo."""


def supports(target: str, hardware: HardwareSpec) -> bool:
    """Return whether `hardware` runs kernels of `target`."""
    need = REQUIREMENTS.get(target)
    if need is None:
        return False
    return need.arch in (None, hardware.arch) and need.flags <= set(hardware.isa_flags)


def allowed_targets(hardware: HardwareSpec) -> tuple[str, ...]:
    """Return the targets that `hardware` may run, best first: all that it supports, or one.

    Raises SpecError where DOVETAIL_TARGET names none of these.
    """
    forced = forced_target(REQUIREMENTS, lambda target: supports(target, hardware))
    if forced is not None:
        return (forced,)
    return tuple(target for target in REQUIREMENTS if supports(target, hardware))


def kept_targets(targets: Sequence[str], hardware: HardwareSpec) -> tuple[str, ...]:
    """Return `targets`, without those of CPUs if `hardware` may run none of them.

    Raises SpecError as `allowed_targets`.
    """
    runs = not set(targets).isdisjoint(allowed_targets(hardware))
    return tuple(target for target in targets if runs or target not in REQUIREMENTS)


def choose_target(artifact: Path, targets: Iterable[str], hardware: HardwareSpec) -> str:
    """Return the best of `targets` that `hardware` may run; ArtifactError if none.

    Raises SpecError as `allowed_targets`.
    """
    offered, flags = tuple(targets), set(hardware.isa_flags)
    allowed = allowed_targets(hardware)
    fitting = [target for target in allowed if target in offered]
    for target in fitting:
        need = REQUIREMENTS[target]
        if not (need.faster in fitting and need.slow & flags):
            return target
    holds = f"{artifact / 'kernels'}: holds kernels for {', '.join(offered) or 'no target'}"
    if forced := os.environ.get(FORCED_TARGET):
        raise ArtifactError(
            f"{holds}, but {FORCED_TARGET} asks for {forced}; unset it, or run "
            f"`dovetail compile {artifact} -o here.dove` under it and use that"
        )
    raise ArtifactError(
        f"{holds}, none of which this CPU ({hardware.cpu_model or hardware.arch}) can run; run "
        f"`dovetail compile {artifact} -o here.dove` on this machine and use that"
    )
