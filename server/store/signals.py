"""The signals that ``cubroker keep`` takes, none of which ends it by itself."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Collection, Iterator
from types import FrameType

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})
"""Those that ask for the end, of the child and then of the keeper."""

FORWARDED = ENDING | {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Those that are the child's."""

UNDONE = (signal.SIGPIPE, signal.SIGXFSZ)
"""Those that Python ignores, which a child would inherit."""


class Signals:
    """Takes signals until it is closed, and lets none through after that; one that is ignored stays so, as under nohup.

    Those that were blocked and have come meanwhile are taken first.

    Args:
        mask: signals that a child is to find blocked; None: those that are blocked now.

    Attributes:
        bell: readable when a signal came, or a child ended.
    """

    def __init__(self, mask: Collection[int] | None = None) -> None:
        self._pending: set[signal.Signals] = set()
        self.bell, self._rope = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._taken = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        self._taken.append(signal.SIGCHLD)
        signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        for number in self._taken:
            signal.signal(number, self._note)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._taken)
        self._mask = blocked if mask is None else mask

    def take(self) -> list[signal.Signals]:
        """Return the signals for the child that came since the last call, and let the bell rest."""
        with contextlib.suppress(BlockingIOError):
            while self.bell.recv(4096):
                pass
        taken = [number for number in FORWARDED if number in self._pending]
        self._pending.difference_update(taken)
        return taken

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Let no signal through for a while."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """Block all signals that were taken, for the rest of this process's life.

        An interpreter that ends gives them back their default effect, and another SIGTERM would then end this process
        with a status that is not the one it was to end with. This process has to have a single thread.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        signal.set_wakeup_fd(-1)
        self.bell.close()
        self._rope.close()

    def release(self) -> None:
        """Have a child of this process, on its way to another program, take signals as it should."""
        signal.set_wakeup_fd(-1)
        for number in (*self._taken, *UNDONE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._pending.add(signal.Signals(number))
