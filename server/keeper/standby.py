"""The process that stands by in ``cubroker keep``: when it is started, and how it takes the place of one that ended.

::

    NONE --the run has served for a second--> PREPARING --READY--> WAITING --hand_over()--> HANDED --TAKEN--> NONE
      ^                                           |                   |                        |
      +---------------------- it ends, or the keeper has no use for it-+------------------------+

It holds nothing until :meth:`NextRun.hand_over`, and duplicates after that. If it fails at any moment, the
keeper starts the next run from the stored descriptors, as without it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cubroker.server import standby
from cubroker.server.keeper.child import Backoff

SETTLED = 1.0
"""Seconds that a run must have served: its clients come first, and what ends soon may end again."""

LONGEST_PAUSE = 600.0  #: Seconds between two starts of processes that end while they stand by.

Start = Callable[[int], int]
"""Starts the command with a socket to the keeper; returns its pid, or raises ``OSError``."""


def _is_direct(pid: int, command: Sequence[str]) -> bool:
    """Whether a process is what a command names, or its interpreter, and no script has started it in its own place."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:  # it has just ended
        return False
    where = len(words) - len(command)  # behind the interpreter and its option
    return where >= 0 and words[where + 1 :] == [*command[1:]] and Path(words[where]).name == Path(command[0]).name


class NextRun:
    """The process that stands by, or will."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._backoff = Backoff(LONGEST_PAUSE)
        self._channel: socket.socket | None = None
        self._began = 0.0
        #: Its pid; 0: there is none.
        self.pid = 0
        #: It has imported everything, and waits.
        self.waits = False
        #: It has everything, and has not answered yet.
        self.handed = False
        #: When the next one is started; :meth:`expect` sets it.
        self.due = math.inf

    def expect(self, now: float, run: int, command: Sequence[str]) -> None:
        """Have one started soon, since a run of ``command`` serves that knows how to stand by."""
        if self.handed:  # it is that run, and has taken over, though it may not have been heard of here
            self._forget()
        if not self.pid and _is_direct(run, command):
            self.due = now + SETTLED

    def start(self, now: float, start: Start) -> None:
        """Start one; raises ``OSError``, and tries again after a pause."""
        self.due = math.inf
        with contextlib.ExitStack() as undo:
            undo.callback(self._pause, now)
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            undo.enter_context(ours)
            with theirs:
                self._epoll.register(ours, select.EPOLLIN)
                self.pid = start(theirs.fileno())
            undo.pop_all()
        self._channel, self._began = ours, now

    def hears(self) -> str:
        """Take in what it says; returns what is worth a line in the log."""
        if self._channel is None:
            return ""
        try:
            message = self._channel.recv(64, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return ""
        if message == standby.READY and not self.handed:
            self.waits = True
            return "stands by"
        if message == standby.TAKEN and self.handed:
            self._forget()
        elif not message:  # its end follows
            self._unwatch()
        return ""

    def hand_over(self, stored: Mapping[int, str]) -> int:
        """Hand over to it, if there is one that waits, and return its pid; 0: there is none now, and no other run."""
        if self.waits and self._channel and standby.hand_over(self._channel, stored):
            self.waits, self.handed = False, True
            return self.pid
        self.end()
        return 0

    def end(self) -> None:
        """Have no process stand by, and start none."""
        self.due = math.inf
        if self.pid and not self.handed:
            os.kill(self.pid, signal.SIGKILL)  # it is reaped like an orphan
        self._forget()

    def has_ended(self, now: float) -> None:
        """Note that it has ended, and was reaped; another follows while :meth:`expect` has asked for one."""
        lasted, taken = now - self._began, self.handed
        self._forget()
        if not taken:
            self.due = now + self._backoff.after(lasted)

    def _pause(self, now: float) -> None:
        self.due = now + SETTLED + self._backoff.after(0.0)

    def _forget(self) -> None:
        self._unwatch()
        self.pid, self.waits, self.handed = 0, False, False

    def _unwatch(self) -> None:
        if self._channel:
            self._epoll.unregister(self._channel)
            self._channel.close()
            self._channel = None
