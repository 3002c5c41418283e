"""Every failure that cubroker reports: one class for each stable code, and the system's errors in words.

A message says what was asked, what stood in the way, and what to do. Code and message are sent to the peer, which
builds the error of the code's class with :func:`from_code`.

An ``OSError`` names its file only if the call took a path. Code that writes to a descriptor or binds a socket adds the
path with :func:`about`; code that reports the failure builds its message with :func:`explain`.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self


class CubrokerError(Exception):
    """A failure with a stable ``code``; the base of all the others."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def anew(self) -> Self:
        """Return a copy without a traceback: a stored error that is raised would keep its callers' frames alive."""
        return type(self)(self.message)


class NotFound(CubrokerError):
    """A pool, version, lease, event, device or file does not exist. An unknown name of a tensor is a ``KeyError``."""

    code = "not_found"


class Exists(CubrokerError):
    """The name is taken: a version of this pool is being written, or an event or a certificate has the name."""

    code = "exists"


class Denied(CubrokerError):
    """The peer's user has no permission."""

    code = "denied"


class OverBudget(CubrokerError):
    """A device's budget has no room for the request."""

    code = "over_budget"


class OverQuota(CubrokerError):
    """The peer has used up its quota of something."""

    code = "over_quota"


class OutOfMemory(CubrokerError):
    """The device itself had no room, although the budget may have some."""

    code = "out_of_memory"


class Unsupported(CubrokerError):
    """The release of one side, the driver, the device or the share kind does not support the request."""

    code = "unsupported"


class Invalid(CubrokerError):
    """The request contradicts itself, the protocol, or an earlier request."""

    code = "invalid"


class Retired(CubrokerError):
    """The version was retired or given up, or has ended: no new leases on it are granted. Those that exist stay."""

    code = "retired"


class TimedOut(CubrokerError):
    """The time given for a wait has passed."""

    code = "timeout"


class Unavailable(CubrokerError):
    """The broker, or the process that a request waits for, is absent or has gone; or the connection is closed."""

    code = "unavailable"


class DeviceFailure(CubrokerError):
    """A driver call failed in a way that no other code covers."""

    code = "device"


class Corrupted(CubrokerError):
    """The bytes of a published version differ from those that were sealed."""

    code = "corrupted"


class InternalFailure(CubrokerError):
    """The broker failed at the request, by a bug or for lack of memory; its log says more."""

    code = "internal"


ERRORS = {error.code: error for error in CubrokerError.__subclasses__()}  #: The class of every code.


def from_code(code: str, message: str) -> CubrokerError:
    """Build the error of ``code``; an unknown code stays in the text."""
    known = ERRORS.get(code)
    return known(message) if known else CubrokerError(f"{message} [{code}]")


class CorruptJournal(Exception):
    """The journal of an earlier broker is damaged, or of a format that this build does not know; it is never sent.

    Nothing is changed and nothing guessed: everything stays stored.
    """


OF_PROCESSES = {
    errno.EMFILE: "raise the limit on open files (`ulimit -n`, LimitNOFILE=)",
    errno.ENFILE: "raise the host's limit on open files (sysctl fs.file-max)",
    errno.ENOMEM: "free memory, or raise the memory limit of this process or its container",
    errno.EAGAIN: "raise the limit on processes and threads (`ulimit -u`, TasksMax=)",
    errno.EADDRINUSE: "stop the process that listens there",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`, LimitFSIZE=)",
}
"""What to do about an error, by its number."""

OF_FILES = {
    errno.ENOSPC: "free space on its file system (`df` and `df -i` show what is left)",
    errno.EDQUOT: "free some of this user's disk quota",
    errno.EROFS: "mount its file system for writing",
    errno.EACCES: "check the owner and the mode of it and of the folders above it",
    errno.ELOOP: "remove the symbolic links that lead to each other",
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "check the path"),
    errno.EPROTOTYPE: "remove it",
    errno.EIO: "see the kernel's log (`dmesg`)",
}
"""The same for errors that name a file. ENOSPC without a file may be the limit on watched files (epoll_ctl(2))."""


def reason(error: Exception, known: str | os.PathLike[str] = "") -> str:
    """Return why the system refused, with the error's path in front unless it is ``known``; never an empty text.

    Args:
        error: an ``OSError``, or an error of a library that reports those, such as ``zmq.ZMQError``.
        known: the path that the caller's own sentence names.
    """
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    named = getattr(error, "filename", None)
    if not isinstance(named, str | bytes | os.PathLike) or os.fsdecode(named) in ("", os.fspath(known)):
        return why
    return f"{os.fsdecode(named)}: {why}"


def remedy(error: Exception) -> str:
    """Return what to do about an error; empty if only the caller knows."""
    known = OF_PROCESSES if getattr(error, "filename", None) is None else OF_PROCESSES | OF_FILES
    return known.get(getattr(error, "errno", None) or 0, "")


def signal_name(number: int) -> str:
    """Return the name of a signal that ended a process; real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def explain(error: Exception, known: str | os.PathLike[str] = "") -> str:
    """Return :func:`reason` and, after a semicolon, :func:`remedy` if there is one."""
    return "; ".join(filter(None, (reason(error, known), remedy(error))))


@contextmanager
def needing(asked: str, install: str) -> Iterator[None]:
    """Say what to install if a block cannot import a package that only some users need.

    Args:
        asked: what needs it, as the subject of a sentence.
        install: what pip installs: ``numpy``, or an extra as ``cubroker[server]``.

    Raises:
        Unsupported: instead of ``ImportError``.
    """
    try:
        yield
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError)
        why = f"{error.name}, which is not installed" if absent else f"a package that cannot be imported ({error})"
        raise Unsupported(f"{asked} needs {why}: pip install '{install}'") from None if absent else error


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Add ``path`` to errors of the block that name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # else its text would give way to the path
            error.filename = os.fspath(path)
        raise
