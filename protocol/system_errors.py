"""What the operating system refused, in words: which file it was, why, and what to do about it.

An ``OSError`` names its file only where a call took a path. Code that writes to a descriptor or binds a socket adds the
path with :func:`about`; code that reports the failure builds its message with :func:`explain`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OF_PROCESSES = {
    errno.EMFILE: "raise the limit on open files (`ulimit -n`, LimitNOFILE=)",
    errno.ENFILE: "raise the host's limit on open files (sysctl fs.file-max)",
    errno.ENOMEM: "free memory, or raise the memory limit of this process or its container",
    errno.EAGAIN: "raise the limit on processes and threads (`ulimit -u`, TasksMax=)",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`, LimitFSIZE=)",
}
"""What to do about an error, by number."""

OF_FILES = {
    errno.ENOSPC: "free space on its file system (`df` and `df -i` show what is left)",
    errno.EDQUOT: "free some of this user's disk quota",
    errno.EROFS: "mount its file system for writing",
    errno.EACCES: "check the owner and the mode of it and of the folders above it",
    errno.ELOOP: "remove the symbolic links that lead to each other",
    errno.EEXIST: "remove it",
    errno.EPROTOTYPE: "remove it",
    errno.EADDRINUSE: "stop the process that listens there",
    errno.EIO: "see the kernel's log (`dmesg`)",
}
"""Likewise, where the error names a file. ENOSPC of none may be the limit on watched files (epoll_ctl(2))."""


def reason(error: Exception, known: str | os.PathLike[str] = "") -> str:
    """Return why the system refused, after the path that it names unless that is ``known`` from the sentence so far.

    The text is never empty: an error without a number has its own words, or the name of its class.

    Args:
        error: an ``OSError``, or one of a library that reports errors of the system, such as ``zmq.ZMQError``.
        known: the path that the caller's own sentence names.
    """
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    named = getattr(error, "filename", None)
    if not isinstance(named, str | bytes | os.PathLike) or os.fsdecode(named) in ("", os.fspath(known)):
        return why
    return f"{os.fsdecode(named)}: {why}"


def remedy(error: Exception) -> str:
    """Return what to do about an error; empty where only the caller can tell."""
    known = OF_PROCESSES if getattr(error, "filename", None) is None else OF_PROCESSES | OF_FILES
    return known.get(getattr(error, "errno", None) or 0, "")


def explain(error: Exception, known: str | os.PathLike[str] = "") -> str:
    """Return :func:`reason` and, after a semicolon, :func:`remedy`, if there is one."""
    return "; ".join(filter(None, (reason(error, known), remedy(error))))


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Add ``path`` to the errors of a block that name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
