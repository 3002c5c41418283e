"""What a service says to its manager, as systemd's notify protocol writes it: the text of each message.

Sources: sd_notify(3), sd_pid_notify_with_fds(3), sd_notify_barrier(3).
"""

from __future__ import annotations

import re
import time

from cubroker.protocol.errors import Invalid

LONGEST_NAME = 24
"""Characters of a stored descriptor's name: those of all have to fit in one environment variable of 128 KiB."""

LONGEST_STATUS = 2000
"""Bytes of a status: a message of 4096 bytes or more would be dropped."""

WATCHDOG = "WATCHDOG=1"
"""This process lives."""

BARRIER = "BARRIER=1"
"""With one descriptor, which is closed once all that was sent before has been acted upon."""

_NAME = re.compile(rf"[!-9;-~]{{1,{LONGEST_NAME}}}")


def ready(text: str) -> str:
    """This process serves, and this is how it fares."""
    return f"READY=1\n{status(text)}"


def status(text: str) -> str:
    """How this process fares, in one line: line ends would begin another field, and half a character is no text."""
    line = " ".join(text.split()).encode(errors="replace")
    return "STATUS=" + line[:LONGEST_STATUS].decode(errors="ignore")


def stopping(seconds: float = 0.0) -> str:
    """This process is about to end, and may take ``seconds``."""
    return "STOPPING=1" + (f"\nEXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}" if seconds else "")


def reloading() -> str:
    """Settings are read again; :func:`ready` says when that is done."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def storing(name: str, *, poll: bool) -> str:
    """The descriptors that come along are to be kept under a name; ``poll``: until they hang up.

    Raises:
        Invalid: the name is not 1 to 24 characters of printable ASCII, without space and colon.
    """
    return f"FDSTORE=1\nFDNAME={_checked(name)}" + ("" if poll else "\nFDPOLL=0")


def removing(name: str) -> str:
    """What is kept under a name is to be closed. Raises as :func:`storing`."""
    return f"FDSTOREREMOVE=1\nFDNAME={_checked(name)}"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} is no name to store under: that is 1 to {LONGEST_NAME} printable ASCII characters, "
            "without space and colon"
        )
    return name
