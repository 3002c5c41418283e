"""What ``cubroker keep`` says on standard error. It never waits for whoever reads that."""

from __future__ import annotations

import os
import select
import stat

LONGEST = 1000
"""Characters of a line: it has to fit in one page of a pipe."""

NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""0 in a Python that was built against an older C library: what writes with it fails there, as for a terminal."""

MOST = 100
"""Lines about what one run of the child does wrong; it may do so for ever."""


class Remarks:
    """Writes lines to a descriptor, and loses what cannot be written at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = _nonblocking_terminal(descriptor) if os.isatty(descriptor) else descriptor
        self._lost = 0
        self._complaints = 0

    def say(self, text: str) -> None:
        """Write a line, and how many were lost before it."""
        lost = f" ({self._lost} lines before this one were lost: they were not read in time)" if self._lost else ""
        line = "".join(c if c.isprintable() else "?" for c in text[:LONGEST])
        try:
            _write(self._descriptor, f"cubroker keep: {line}{lost}\n".encode(errors="backslashreplace"))
            self._lost = 0
        except BlockingIOError:
            self._lost += 1
        except OSError:
            pass  # nobody reads any more

    def complain(self, text: str) -> None:
        """Write a line about what the child did, unless it has had its share of them."""
        self._complaints += 1
        if self._complaints < MOST:
            self.say(text)
        elif self._complaints == MOST:
            self.say(f"{text}; whatever else is wrong will not be reported before the next start")

    def forgive(self) -> None:
        """Begin with another run of the child."""
        self._complaints = 0


def _nonblocking_terminal(descriptor: int) -> int:
    """Return another descriptor of a terminal, whose writes never wait; the same one where it cannot be opened.

    A terminal knows no RWF_NOWAIT, and one that polls as writable may have room for a part of a line only.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return descriptor


def _write(descriptor: int, line: bytes) -> None:
    """Write a line at once, or raise BlockingIOError. The file may be others' too, so its mode is left alone."""
    try:
        os.pwritev(descriptor, [line], -1, NOWAIT)
    except BlockingIOError:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise
        os.write(descriptor, line)  # to XFS and btrfs a file that grows is never written without waiting
    except OSError:  # terminals and other files know no such flag
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError from None
        if os.write(descriptor, line) < len(line):
            raise BlockingIOError from None
