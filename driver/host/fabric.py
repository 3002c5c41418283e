"""Fabric handles of host devices: 64 bytes that open memory, in every process that is on the same channel.

A GPU's driver makes and takes such handles only in a process that may use an IMEX channel, a device file, and takes
those of the same channel alone. Here the channel of a process is a number in its environment, looked up with every
call. As with real ones, the bytes are all that it takes: whoever knows them has the memory.
"""

from __future__ import annotations

import os
import struct

from cubroker.driver.host import descriptors, ranges, sharing
from cubroker.driver.host.answers import Refusal, Result
from cubroker.driver.host.ranges import Physical

CHANNEL = "CUBROKER_HOST_CHANNEL"
"""The environment variable with this process's channel, for tests; where it is not set, there is none."""

_CHANNEL = struct.Struct("=I")
_PLACE = 32
"""Bytes: where the channel is in a handle, behind the owner's address and the secret."""


class Exports:
    """The memory of this process that has fabric handles; the driver holds its lock around every call."""

    def __init__(self) -> None:
        self._offers = sharing.Offers()
        self._handles: dict[Physical, bytes] = {}

    def export(self, physical: Physical) -> bytes:
        """Return the handle of some memory, the same each time."""
        channel = check_channel()
        if physical not in self._handles:
            handle = self._offers.add(sharing.Offer(physical.fd, physical.device))
            self._handles[physical] = handle[:_PLACE] + _CHANNEL.pack(channel) + handle[_PLACE + _CHANNEL.size :]
        return self._handles[physical]

    def withdraw(self, physical: Physical) -> None:
        """End the handle of memory that is about to be released, if it has one; mappings elsewhere stay."""
        if physical in self._handles:
            self._offers.withdraw(self._handles.pop(physical))


def check_channel() -> int:
    """Return this process's channel, or refuse."""
    channel = os.environ.get(CHANNEL, "")
    if not channel.isdecimal():
        raise Refusal(Result.CUDA_ERROR_NOT_PERMITTED)
    return int(channel)


def adopt(handle: bytes, devices: int) -> Physical:
    """Return the memory that a handle stands for, which whoever made it has not released.

    Raises:
        LookupError: it stands for no memory of any of so many devices.
        TimeoutError: its owner does not answer.
    """
    channel = check_channel()
    fd, _, _ = sharing.fetch(handle)
    try:
        if _CHANNEL.unpack_from(handle, _PLACE) != (channel,):
            raise Refusal(Result.CUDA_ERROR_NOT_PERMITTED)
        return ranges.adopt(fd, devices)
    finally:
        descriptors.close(fd)
