"""Waiting, in one process, for a number in shared memory that another one changes."""

from __future__ import annotations

import ctypes
import platform

_SYS_FUTEX = 202 if platform.machine() == "x86_64" else 98
"""The number of futex(2); 98 is that of every newer architecture."""

_WAIT = 0
_WAKE = 1
_ALL = 2**31 - 1

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


def wait(address: int, value: int) -> None:
    """Sleep until somebody calls ``wake``, unless the 32 bits there are no longer ``value``; it may return early."""
    _futex(address, _WAIT, value)


def wake(address: int) -> None:
    """Wake all who wait there, in whichever process."""
    _futex(address, _WAKE, _ALL)


def _futex(address: int, operation: int, number: int) -> None:
    _syscall(*map(ctypes.c_long, (_SYS_FUTEX, address, operation, number, 0, 0, 0)))
