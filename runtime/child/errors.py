"""An error on its way between two processes: its class by name, and its text."""

from __future__ import annotations

import msgspec

from dovetail.ir import errors
from dovetail.ir.errors import DeviceError, DovetailError

DETAILS = {"CapacityError": "retry_after", "LengthError": "field"}
"""What errors of a class tell beside their text."""
TOLD_AS = {"MissingKernelsError": "ArtifactError", "SyntaxDiagnostic": "SpecError"}
"""Classes that are made of more than goes with a message, and what stands for them."""


class ErrorText(msgspec.Struct, frozen=True, array_like=True):
    """An error: its class in `ir.errors`, its text, and the detail that its class has."""

    kind: str
    message: str
    detail: float | str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorText:
        """Return an error as a message; one that is none of ours is a DeviceError's text."""
        kind = type(error).__name__
        if not isinstance(error, DovetailError):
            return cls("DeviceError", f"{kind}: {error}")
        return cls(TOLD_AS.get(kind, kind), str(error), getattr(error, DETAILS.get(kind, ""), None))

    def make(self) -> DovetailError:
        """Return the error."""
        found = getattr(errors, self.kind, DeviceError)
        known = isinstance(found, type) and issubclass(found, DovetailError)
        detail = (self.detail,) if self.kind in DETAILS else ()
        return (found if known else DeviceError)(self.message, *detail)
