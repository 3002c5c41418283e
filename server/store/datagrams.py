"""The messages that a kept process sends, as they arrive: who sent them, their fields, their descriptors."""

from __future__ import annotations

import array
import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

LONGEST = 4096
"""Bytes of a message; systemd takes no longer ones either."""

_CREDENTIALS = struct.Struct("iII")
_MOST_DESCRIPTORS = 253
_SPACE = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)
_FIELD = re.compile(r"[A-Z0-9_]+=.*")


class Malformed(ValueError):
    """A message that is none of the protocol's. The text says what is wrong with it."""


class Datagram(NamedTuple):
    """One message; whoever has it closes its descriptors.

    Attributes:
        pid: of the sender, by the kernel's word; 0: it is in no visible pid namespace.
        data: the text.
        descriptors: what came with it.
        whole: neither text nor descriptors were cut off.
    """

    pid: int
    data: bytes
    descriptors: list[int]
    whole: bool


def listen(path: str) -> socket.socket:
    """Return a socket that messages can be sent to."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        channel.bind(path)
    except OSError:
        channel.close()
        raise
    return channel


def receive(channel: socket.socket) -> Datagram | None:
    """Take the next message; None if there is none."""
    try:
        data, ancillary, flags, _ = channel.recvmsg(LONGEST, _SPACE, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    pid = 0
    descriptors = array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
        elif kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack_from(content)[0]
    return Datagram(pid, data, descriptors.tolist(), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def parse(datagram: Datagram) -> dict[str, str]:
    """Return the fields of a message; of two with the same name the first counts.

    Raises:
        Malformed: it is cut off, no text, or has a line that is no field.
    """
    if not datagram.whole:
        raise Malformed(f"it is cut off: over {LONGEST} bytes of text, or no descriptor was left here")
    try:
        lines = datagram.data.decode().split("\n")
    except UnicodeDecodeError:
        raise Malformed("it is not UTF-8") from None
    fields: dict[str, str] = {}
    for line in filter(None, lines):
        if not _FIELD.fullmatch(line) or "\0" in line:
            raise Malformed(f"{line[:80]!r} is no NAME=value")
        name, _, value = line.partition("=")
        fields.setdefault(name, value)
    return fields


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors. What one has to say at its end concerns nobody here."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
