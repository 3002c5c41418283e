"""Every failure that cubroker reports, one class per stable code.

A message says what was asked, what stood in the way, and what to do about it. The code is what
travels: the side that receives one builds the class that belongs to it with :func:`from_code`.
"""

from __future__ import annotations

from typing import ClassVar, Self


class CubrokerError(Exception):
    """A failure with a stable ``code``; the base of all the others."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def anew(self) -> Self:
        """Return the same failure without a traceback: one that is kept and raised would keep its callers' frames."""
        return type(self)(self.message)


class NotFound(CubrokerError):
    """There is no such pool, version, lease, device or tensor."""

    code = "not_found"


class Exists(CubrokerError):
    """The name is taken: somebody else is writing a version of this pool."""

    code = "exists"


class Denied(CubrokerError):
    """The peer's user may not do this."""

    code = "denied"


class OverBudget(CubrokerError):
    """A device's budget has no room for the request."""

    code = "over_budget"


class OverQuota(CubrokerError):
    """The peer has used up what it is allowed of something."""

    code = "over_quota"


class OutOfMemory(CubrokerError):
    """The device itself had no room, whatever the budget says."""

    code = "out_of_memory"


class Unsupported(CubrokerError):
    """No support for it in this build, driver or device."""

    code = "unsupported"


class Invalid(CubrokerError):
    """The request contradicts itself, the protocol, or what the caller did before."""

    code = "invalid"


class Retired(CubrokerError):
    """The version was retired; whoever holds it keeps it, nobody else gets it."""

    code = "retired"


class TimedOut(CubrokerError):
    """What was waited for did not happen in the time given."""

    code = "timeout"


class Unavailable(CubrokerError):
    """The broker, or whoever makes what was waited for, is not there or went away; or the connection is closed."""

    code = "unavailable"


class DeviceFailure(CubrokerError):
    """A driver call failed in a way that no other code covers."""

    code = "device"


class Corrupted(CubrokerError):
    """The bytes of a published version are not those that were sealed."""

    code = "corrupted"


class InternalFailure(CubrokerError):
    """The broker itself failed at the request, by a mistake of its own or for want of memory; its log says more."""

    code = "internal"


ERRORS: dict[str, type[CubrokerError]] = {
    error.code: error
    for error in (
        NotFound,
        Exists,
        Denied,
        OverBudget,
        OverQuota,
        OutOfMemory,
        Unsupported,
        Invalid,
        Retired,
        TimedOut,
        Unavailable,
        DeviceFailure,
        Corrupted,
        InternalFailure,
    )
}


def from_code(code: str, message: str) -> CubrokerError:
    """Build the error of ``code``; one that this version does not know keeps its code in the text."""
    known = ERRORS.get(code)
    return known(message) if known else CubrokerError(f"{message} [{code}]")
