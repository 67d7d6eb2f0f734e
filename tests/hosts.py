"""The targets that this machine runs."""

from __future__ import annotations

import platform

from dovetail.codegen.isa.target import Target
from dovetail.codegen.targets import TARGETS, host_features, runs_on


def host_targets() -> tuple[Target, ...]:
    """Return them best first."""
    machine, features = platform.machine(), host_features()
    return tuple(t for t in TARGETS.values() if runs_on(t, machine, features))
