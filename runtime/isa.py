"""Which of an artifact's instruction-set targets this machine can run.

In: target names and a HardwareSpec. Out: the most capable target that fits, or an ArtifactError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dovetail.ir.cpu import TILE_FLAGS
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

REQUIREMENTS: dict[str, Requirement] = {
    "x86-64-amx": Requirement("x86_64", _VNNI | TILE_FLAGS),
    "x86-64-avx512bf16": Requirement(
        "x86_64",
        _VNNI | {"avx512_bf16"},
        slow=frozenset({"avx512_fp16"}),
        faster="x86-64-avx512vnni",
    ),
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


def choose_target(artifact: Path, targets: Iterable[str], hardware: HardwareSpec) -> str:
    """Return the best of `targets` that `hardware` supports; ArtifactError if none."""
    offered, flags = tuple(targets), set(hardware.isa_flags)
    for target, need in REQUIREMENTS.items():
        beaten = need.faster in offered and bool(need.slow & flags)
        if target in offered and supports(target, hardware) and not beaten:
            return target
    raise ArtifactError(
        f"{artifact / 'kernels'}: holds kernels for {', '.join(offered) or 'no target'}, none of "
        f"which this CPU ({hardware.cpu_model or hardware.arch}) can run; run "
        f"`dovetail compile MODEL -o {artifact}` on this machine"
    )
