"""The one error tree. All a user can cause ends in one of these; `assert` is for our own bugs.

Lives in the lowest layer so that every folder can raise it; `dovetail.errors` is the public name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.diagnostics import Diagnostic


class DovetailError(Exception):
    """Base of all errors meant for users: one clear sentence and what to do next."""


class SpecError(DovetailError):
    """An input (model, hardware file, workload, option) is missing, malformed or unsupported."""


class SyntaxDiagnostic(DovetailError):
    """Kernel text is wrong; carries every diagnostic found, each with its span."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))


class ScheduleError(DovetailError):
    """A schedule or parameter binding is illegal; a search treats it as pruning."""


class ToolchainError(DovetailError):
    """No C compiler, or one that failed; carries the command and its full stderr."""

    def __init__(self, message: str, command: Sequence[str] = (), stderr: str = "") -> None:
        self.command = tuple(command)
        self.stderr = stderr
        shown = [message]
        if command:
            shown.append("command: " + " ".join(command))
        if stderr:
            shown.append(stderr.rstrip())
        super().__init__("\n".join(shown))


class ArtifactError(DovetailError):
    """An artifact is damaged, too new or unfit for this machine; names the file and the remedy."""


class MissingKernelsError(ArtifactError):
    """This machine lacks kernels that artifacts share; building them is the remedy.

    kernels: what is missing, entries of the artifact's index of kernels for `target`.
    """

    def __init__(self, artifact: Path, target: str, kernels: Sequence[KernelEntry]) -> None:
        self.artifact, self.target, self.kernels = artifact, target, tuple(kernels)
        names = ", ".join(kernel.name for kernel in kernels[:2]) + ", ..." * (len(kernels) > 2)
        super().__init__(
            f"{artifact} needs kernels for {target} that no shared library of this machine has "
            f"({names}); run `dovetail compile {artifact} -o {artifact}` to build them"
        )


class CapacityError(DovetailError):
    """The machine is full (BUSY); `retry_after` says in how many seconds to try again.

    None: waiting does not help.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RankError(DovetailError):
    """A process of a tensor-parallel group died; what ran is lost, the next request starts anew."""


class DeviceError(DovetailError):
    """A device could not run a step: a kernel failed, or memory ran out. Only that step is lost."""


class RequestError(DovetailError):
    """One request is wrong (too long, bad sampling parameters); others are unaffected."""


class LengthError(RequestError):
    """A text is longer than what is to read it; waiting does not help. field: what it is called."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class WorkflowError(DovetailError):
    """A workflow is malformed or a node failed; names the node."""


def install(extra: str) -> str:
    """Return the command that installs an extra of ours, for errors that ask for one."""
    return f"pip install 'dovetail[{extra}]'"


def describe_error(error: BaseException) -> str:
    """Return what an error says, with its kind where it is none of ours."""
    return str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
