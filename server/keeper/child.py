"""The child of ``cubroker keep``: its start, its phases, the pause before the next start, and the child that stands by.

Each phase has a time limit, like those of a systemd service (TimeoutStartSec, WatchdogSec, TimeoutStopSec)::

    STARTING ---READY---> SERVING ---STOPPING or told to end---> STOPPING
        |                    |                                      |
        | limits.start       | limits.watchdog                      | limits.stop
        v                    v                                      v
     ABORTED <---------------+--------------- ABORTING --------> KILLED --- UNKILLABLE ---> STUCK

A process that hangs while it starts or serves gets SIGABRT first, so that it can say where it hangs. A process that was
told to end and does not gets SIGKILL. A process that still exists after SIGKILL hangs in the kernel.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import FrameType
from typing import NamedTuple

from cubroker.protocol.errors import explain
from cubroker.server.hardening import blocked
from cubroker.server.store.sd_notify import (
    COMMAND,
    FIRST,
    OFFER,
    READY,
    SPEAKS,
    STANDBY,
    TAKEN,
    VARIABLES,
    checksum,
    hand_over,
)

NOT_EXECUTABLE, NOT_FOUND = 126, 127  #: Exit statuses of a command that cannot be run, as a shell's.

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})
"""Signals that ask for the end, of the child and then of the keeper."""

FORWARDED = ENDING | {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}  #: Signals that are passed on to the child.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  #: Signals whose default effect the child gets back.

ABORTING = 5.0  #: Seconds that a hung process has, after SIGABRT, to say where it hangs; then comes SIGKILL.
UNKILLABLE = 10.0  #: Seconds after SIGKILL until a process counts as stuck in the kernel, as in a driver that hangs.
LATE = 0.1  #: Fraction of a limit by which the keeper itself may be late. If it is later, the machine stood still.
STEADY = 10.0  #: Seconds that a run must have lasted for the next start to follow immediately.
FIRST_PAUSE = 0.05  #: Seconds of pause after the second short run in a row, doubled after each further one.
LONGEST_PAUSE = 5.0
SETTLED = 1.0  #: Seconds that a run must have served before the next process is started: clients come first.
LONGEST_STANDBY_PAUSE = 600.0  #: Seconds between two starts of processes that end while they stand by.


class KeeperSignals:
    """The signals that the keeper handles until it is closed; none of them ends it by default.

    A signal that is ignored stays ignored, as under nohup. Signals that were blocked and pending are handled first. The
    signals of ``mask`` are blocked when the child starts; None stands for those that are blocked now.

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

    def blocked(self) -> AbstractContextManager[None]:
        """Block the handled signals in a ``with`` block."""
        return blocked(self._handled)

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
    signals: KeeperSignals,
    say: Callable[[str], None],
    standby: int | None = None,
) -> int:
    """Start a command and return its pid, which is that of its process group too.

    The child does not die with its parent: a broker whose keeper was killed continues to serve, and only the stored
    descriptors are lost. This process must have a single thread. Raises ``OSError`` if there is no room for another.

    Args:
        command: program and arguments; the program is looked for in ``PATH``.
        environ: variables of the protocol, without those that need the pid.
        stored: descriptors, each at least 3, and their names.
        signals: those that this process handles, and the child must not.
        say: called with the reason if the command cannot be run.
        standby: a descriptor that the child inherits if it is to stand by (:mod:`cubroker.server.store.sd_notify`).
    """
    # Another manager's variables are for this process, not for the child.
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    inherited |= {STANDBY: OFFER if standby is None else str(standby), COMMAND: checksum(command)}
    with signals.blocked():  # a signal that arrives before the child has executed the program must wait
        pid = os.fork()
        if pid == 0:
            try:
                if standby is not None:
                    os.set_inheritable(standby, True)
                _become(command, {**inherited, **environ}, stored, signals)
            except FileNotFoundError:
                say(f"{command[0]} is not found; give its path, or a PATH that has it")
                os._exit(NOT_FOUND)
            except OSError as error:
                say(f"{command[0]} cannot be run: {explain(error, command[0])}")
            finally:
                os._exit(NOT_EXECUTABLE)
    return pid


def _become(command: Sequence[str], environ: dict[str, str], stored: Mapping[int, str], signals: KeeperSignals) -> None:
    os.setpgid(0, 0)  # a terminal's signals to a group reach the child once, through the keeper
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

    A descriptor with such a number keeps it, and the others get the free ones. So no temporary number is needed, and no
    descriptor that is still to be moved is overwritten.
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


class TimeLimits(NamedTuple):
    """Seconds that a process has; None for no limit."""

    #: Until it says that it is ready.
    start: float | None = None
    #: Between two signs of life while it serves.
    watchdog: float | None = None
    #: To end, once it was told to or has announced it.
    stop: float | None = None


class RunPhase(Enum):
    """The phase of a process; see above."""

    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()
    ABORTED = auto()
    KILLED = auto()
    STUCK = auto()


FORCED = frozenset({RunPhase.ABORTED, RunPhase.KILLED, RunPhase.STUCK})  #: Phases of a process whose time was over.

ABORT = (signal.SIGABRT, signal.SIGCONT)  #: Without SIGCONT a stopped process would not handle SIGABRT.

OVERDUE: Mapping[RunPhase, tuple[RunPhase, Sequence[signal.Signals], str]] = {
    RunPhase.STARTING: (RunPhase.ABORTED, ABORT, "is not ready after {:g} s, and is aborted"),
    RunPhase.SERVING: (RunPhase.ABORTED, ABORT, "gave no sign of life in time, and is aborted"),
    RunPhase.STOPPING: (RunPhase.KILLED, [signal.SIGKILL], "does not end, and is killed"),
    RunPhase.ABORTED: (RunPhase.KILLED, [signal.SIGKILL], "does not end, and is killed"),
    RunPhase.KILLED: (RunPhase.STUCK, [], "is still there {:g} s after SIGKILL: it hangs in the kernel"),
}
"""What follows a phase whose time is over: the next phase, the signals that are sent, and what the log says."""


@dataclass
class Run:
    """A process from its start to its end. All times are seconds of the monotonic clock."""

    pid: int
    #: When it was started.
    began: float
    #: How long each phase may take.
    limits: TimeLimits = field(default_factory=TimeLimits)
    phase: RunPhase = RunPhase.STARTING
    #: Whether it has reported that it serves.
    ready: bool = False
    #: Whether it supports standing by, and so another process of its command does.
    stands_by: bool = False
    #: The last status that it sent.
    status: str = ""
    #: When :meth:`enforce` acts next.
    due: float = field(init=False)
    _granted: float = field(init=False)

    def __post_init__(self) -> None:
        self._enter(RunPhase.STARTING, self.began)

    def handle(self, fields: Mapping[str, str], now: float) -> list[str]:
        """Handle a message of the process, and return the texts of lines for the log."""
        news = []
        self.status = fields.get("STATUS", self.status)
        if (watchdog := _seconds(fields, "WATCHDOG_USEC")) is not None:
            self.limits = self.limits._replace(watchdog=watchdog or None)
            self._prove_life(now)
        if fields.get("RELOADING") == "1":
            news.append("reads its settings again")
        if fields.get("READY") == "1":
            self.ready = True
            self.stands_by = fields.get(SPEAKS) == "1"
            if self.phase in (RunPhase.STARTING, RunPhase.SERVING):
                self._enter(RunPhase.SERVING, now)
            news.append("is ready")
        if fields.get("WATCHDOG") == "1":
            self._prove_life(now)
        if fields.get("WATCHDOG") == "trigger" and self.phase in (RunPhase.STARTING, RunPhase.SERVING):
            self.due = now
        if fields.get("STOPPING") == "1":
            self.stop(now)
            news.append("is about to end")
        extension = _seconds(fields, "EXTEND_TIMEOUT_USEC")
        if extension and self.phase in (RunPhase.STARTING, RunPhase.STOPPING) and now + extension > self.due:
            self._granted, self.due = extension, now + extension
        return news

    def restart_time(self, now: float, limits: TimeLimits) -> None:
        """Give the process other limits, and the whole time for its start again."""
        self.limits = limits
        if self.phase is RunPhase.STARTING:
            self._enter(RunPhase.STARTING, now)

    def stop(self, now: float) -> None:
        """Begin the time that the process has to end, unless it has begun."""
        if self.phase in (RunPhase.STARTING, RunPhase.SERVING):
            self._enter(RunPhase.STOPPING, now)

    def enforce(self, now: float) -> str | None:
        """End a process whose time is over; return the text for the log, None if nothing was done."""
        if now < self.due:
            return None
        if self.phase not in FORCED and now - self.due > LATE * self._granted:
            self._enter(self.phase, now)
            return None
        following, numbers, words = OVERDUE[self.phase]
        words = words.format(self._granted)
        self._enter(following, now)
        for number in numbers:
            os.kill(self.pid, number)
        return words

    def _prove_life(self, now: float) -> None:
        if self.phase is RunPhase.SERVING:
            self._enter(RunPhase.SERVING, now)

    def _enter(self, phase: RunPhase, now: float) -> None:
        """Begin a phase, or the time of the present phase again."""
        self.phase = phase
        limits = {
            RunPhase.STARTING: self.limits.start,
            RunPhase.SERVING: self.limits.watchdog,
            RunPhase.STOPPING: self.limits.stop,
            RunPhase.ABORTED: ABORTING,
            RunPhase.KILLED: UNKILLABLE,
            RunPhase.STUCK: None,
        }
        self._granted = limits[phase] or math.inf
        self.due = now + self._granted


def _seconds(fields: Mapping[str, str], name: str) -> float | None:
    """Return a field with microseconds in seconds; None if it is absent or no number."""
    value = fields.get(name, "")
    return int(value) / 1e6 if re.fullmatch("[0-9]{1,18}", value) else None


class Backoff:
    """The pauses between runs: none after a steady run, then longer with every short one, up to ``longest`` seconds."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._next = 0.0

    def after(self, lasted: float) -> float:
        """Return the seconds to wait after a run of ``lasted`` seconds."""
        if lasted >= STEADY:
            self._next = 0.0
            return 0.0
        delay = self._next
        self._next = min(max(2 * delay, FIRST_PAUSE), self._longest)
        return delay


# -- standing by ---------------------------------------------------------------------------------------


class NextRun:
    """The process that stands by: when it is started, and how it takes the place of one that ended.

    ::

        NONE --the run has served for a second--> PREPARING --READY--> WAITING --hand_over()--> HANDED --TAKEN--> NONE
          ^                                           |                   |                        |
          +---------------------- it ends, or the keeper has no use for it-+------------------------+

    It has none of the stored descriptors until :meth:`NextRun.hand_over`, and duplicates after that. If it fails at any
    moment, the keeper starts the next run from the stored descriptors, as if there had been no standby.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._backoff = Backoff(LONGEST_STANDBY_PAUSE)
        self._channel: socket.socket | None = None
        self._began = 0.0
        #: Its pid; 0 if there is no such process.
        self.pid = 0
        #: Whether it has imported everything, and waits.
        self.waits = False
        #: Whether the descriptors were handed to it, and it has not answered yet.
        self.handed = False
        #: When the next one is started; :meth:`expect` sets it.
        self.due = math.inf

    def expect(self, now: float) -> None:
        """Schedule its start, since a run serves that supports standing by."""
        if self.handed:  # it is that run, and has taken over, even if its answer was not read yet
            self._forget()
        if not self.pid:
            self.due = now + SETTLED

    def start(self, now: float, start: Callable[[int], int]) -> None:
        """Start the process; if that fails, raise ``OSError``, and try again after a pause.

        ``start`` starts the command with a socket to the keeper, and returns its pid.
        """
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
        """Read a message of the process; return the text for the log, which may be empty."""
        if self._channel is None:
            return ""
        try:
            message = self._channel.recv(64, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return ""
        if message == READY and not self.handed:
            self.waits = True
            return "stands by"
        if message == TAKEN and self.handed:
            self._forget()
        elif not message:  # its end follows
            self._unwatch()
        return ""

    def hand_over(self, stored: Mapping[int, str]) -> int:
        """Hand over to the process if it waits, and return its pid; otherwise end it, if there is one, and return 0."""
        if self.waits and self._channel and hand_over(self._channel, stored):
            self.waits, self.handed = False, True
            return self.pid
        self.end()
        return 0

    def end(self) -> None:
        """End the process that stands by, if there is one, and start none."""
        self.due = math.inf
        if self.pid and not self.handed:
            os.kill(self.pid, signal.SIGKILL)  # it is reaped like an orphan
        self._forget()

    def has_ended(self, now: float) -> None:
        """Note that the process ended and was reaped; schedule another, unless the descriptors were handed to it."""
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
