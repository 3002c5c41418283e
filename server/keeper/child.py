"""The child of ``cubroker keep``: the signals that are for it, and its start with the stored descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType

from cubroker.protocol.errors import explain
from cubroker.server.store.sd_notify import FIRST, VARIABLES

NOT_EXECUTABLE, NOT_FOUND = 126, 127  #: Exit statuses of a command that cannot be run, as a shell's.

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})
"""Signals that ask for the end, of the child and then of the keeper."""

FORWARDED = ENDING | {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}  #: Signals that are passed on to the child.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  #: Signals whose default effect the child gets back.


class Signals:
    """The signals that the keeper handles until it is closed; none of them ends it by itself.

    Not to be confused with :class:`cubroker.server.main.Signals`.

    A signal that is ignored stays ignored, as under nohup. Signals that were blocked and pending come first. The child
    is to find those of ``mask`` blocked; None: those that are blocked now.

    Attributes:
        wakeup: readable when a signal came, or a child ended.
    """

    def __init__(self, mask: Collection[int] | None = None) -> None:
        self._pending: set[signal.Signals] = set()
        self.wakeup, self._writer = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._handled = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        self._handled.append(signal.SIGCHLD)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._handled:
            signal.signal(number, self._note)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handled)
        self._mask = blocked if mask is None else mask

    def take(self) -> list[signal.Signals]:
        """Return the signals for the child that came since the last call, and empty ``wakeup``."""
        with contextlib.suppress(BlockingIOError):
            while self.wakeup.recv(4096):
                pass
        taken = [number for number in FORWARDED if number in self._pending]
        self._pending.difference_update(taken)
        return taken

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Block the handled signals for a while."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """Block the handled signals for the rest of this process's life.

        An interpreter that ends restores their default effect, and another SIGTERM would then end this process with the
        wrong status. This process must have a single thread.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)
        signal.set_wakeup_fd(-1)
        self.wakeup.close()
        self._writer.close()

    def release(self) -> None:
        """Restore the effect and the mask of all signals, in a child that is about to run another program."""
        signal.set_wakeup_fd(-1)
        for number in (*self._handled, *IGNORED_BY_PYTHON):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._pending.add(signal.Signals(number))


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    stored: Mapping[int, str],
    signals: Signals,
    say: Callable[[str], None],
) -> int:
    """Start a command and return its pid, which is that of its process group too.

    The child does not die with its parent: a broker whose keeper was killed goes on to serve, and only the stored
    descriptors are lost. This process must have a single thread. Raises ``OSError`` if there is no room for another.

    Args:
        command: program and arguments; the program is looked for in ``PATH``.
        environ: variables of the protocol, without those that need the pid.
        stored: descriptors, each at least 3, and their names.
        signals: those that this process handles, and the child must not.
        say: told of a command that cannot be run.
    """
    # Another manager's variables are for this process, not for the child.
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with signals.blocked():  # a signal that comes before the child is the program must wait, not be lost
        pid = os.fork()
        if pid == 0:
            try:
                _become(command, {**inherited, **environ}, stored, signals)
            except FileNotFoundError:
                say(f"{command[0]} is not found; give its path, or a PATH that has it")
                os._exit(NOT_FOUND)
            except OSError as error:
                say(f"{command[0]} cannot be run: {explain(error, command[0])}")
            finally:
                os._exit(NOT_EXECUTABLE)
    return pid


def _become(command: Sequence[str], environ: dict[str, str], stored: Mapping[int, str], signals: Signals) -> None:
    os.setpgid(0, 0)  # a terminal's signals to its group come once, through the keeper
    pid = str(os.getpid())
    if stored:
        names = ":".join(_renumber(stored))
        environ |= {"LISTEN_PID": pid, "LISTEN_FDS": str(len(stored)), "LISTEN_FDNAMES": names}
    if "WATCHDOG_USEC" in environ:
        environ["WATCHDOG_PID"] = pid
    signals.release()
    os.execvpe(command[0], tuple(command), environ)  # noqa: S606  the user's command is what it is for


def _renumber(stored: Mapping[int, str]) -> list[str]:
    """Give descriptors the numbers from 3 on, and return the names in that order.

    A descriptor with such a number keeps it, and the others get the free ones: no other number is needed meanwhile, and
    none that is still to be moved is overwritten.
    """
    numbers = range(FIRST, FIRST + len(stored))
    others = iter([descriptor for descriptor in stored if descriptor not in numbers])
    names = []
    for number in numbers:
        if number in stored:
            os.set_inheritable(number, True)
            names.append(stored[number])
        else:
            descriptor = next(others)
            os.dup2(descriptor, number)
            names.append(stored[descriptor])
    return names
