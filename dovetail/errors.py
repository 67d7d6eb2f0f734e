"""The errors a user can meet, under their public name; the tree lies in `dovetail.ir.errors`."""

from dovetail.ir.errors import (
    ArtifactError,
    CapacityError,
    DeviceError,
    DovetailError,
    LengthError,
    MissingKernelsError,
    RankError,
    RequestError,
    ScheduleError,
    SpecError,
    SyntaxDiagnostic,
    ToolchainError,
    WorkflowError,
)

__all__ = [
    "ArtifactError",
    "CapacityError",
    "DeviceError",
    "DovetailError",
    "LengthError",
    "MissingKernelsError",
    "RankError",
    "RequestError",
    "ScheduleError",
    "SpecError",
    "SyntaxDiagnostic",
    "ToolchainError",
    "WorkflowError",
]
