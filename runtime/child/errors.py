"""An error on its way between two processes: its class by name, and its text."""

from __future__ import annotations

import msgspec

from dovetail.ir import errors
from dovetail.ir.errors import CapacityError, DeviceError, DovetailError


class ErrorText(msgspec.Struct, frozen=True, array_like=True):
    """An error: its class in `ir.errors`, its text, and when there may be room."""

    kind: str
    message: str
    retry_after: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorText:
        """Return an error as a message; one that is none of ours is a DeviceError's text."""
        if not isinstance(error, DovetailError):
            return cls("DeviceError", f"{type(error).__name__}: {error}")
        return cls(type(error).__name__, str(error), getattr(error, "retry_after", None))

    def make(self) -> DovetailError:
        """Return the error."""
        if self.kind == "CapacityError":
            return CapacityError(self.message, self.retry_after)
        found = getattr(errors, self.kind, DeviceError)
        known = isinstance(found, type) and issubclass(found, DovetailError)
        return (found if known else DeviceError)(self.message)
