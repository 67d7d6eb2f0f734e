"""The errors a user can meet, under their public name; the tree lies in `dovetail.ir.errors`."""

from dovetail.ir import errors

ArtifactError = errors.ArtifactError
CapacityError = errors.CapacityError
DeviceError = errors.DeviceError
DovetailError = errors.DovetailError
LengthError = errors.LengthError
MissingKernelsError = errors.MissingKernelsError
RankError = errors.RankError
RequestError = errors.RequestError
ScheduleError = errors.ScheduleError
SpecError = errors.SpecError
SyntaxDiagnostic = errors.SyntaxDiagnostic
ToolchainError = errors.ToolchainError
WorkflowError = errors.WorkflowError
