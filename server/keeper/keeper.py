"""``cubroker keep``: a supervisor of one process, small enough to be trusted with what must outlive that process.

It answers systemd's notify protocol and keeps the descriptors that the process stores. When the process ends, it starts
the process again with them. It has one thread and waits in one place. The order of the work there matters. Hang-ups are
handled before messages, since a message may bring descriptors with the numbers of those that hung up. Messages are
handled before the end of the process, since its last messages count.

The keeper may be a service of systemd itself. The process then sends its messages to both of them
(:class:`~cubroker.server.store.sd_notify.Manager`), so that its descriptors outlive the keeper. systemd knows the
service of a message by its sender, so the keeper waits, before it reaps the process, until systemd has handled the
messages of the process. The keeper starts with what systemd has stored, gives signs of life of its own, and leaves to
systemd what it cannot mend: a process that ends with an error before it is ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import platform
import re
import resource
import select
import shlex
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cubroker.protocol.errors import Invalid, Unavailable, explain, signal_name
from cubroker.server.hardening import hide
from cubroker.server.keeper import child
from cubroker.server.keeper.child import (
    ENDING,
    FORCED,
    LONGEST_PAUSE,
    Backoff,
    KeeperSignals,
    NextRun,
    Run,
    RunPhase,
    TimeLimits,
)
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import LONGEST_NAME, Barrier, Datagram, Malformed, Manager, close_all

AT_ONCE = 512  #: Messages that are handled before signals and the watchdog are handled again.
LEFT_BEHIND = 65536  #: Messages that are read once the child has ended: more than a queue holds, and an end to a flood.

LONGEST_WAIT = 3600.0
ANSWER = 3.0  #: Seconds within which a process that stood by must answer that it takes over.
RETRY_PAUSE = 0.1  #: Seconds before the next attempt when the machine has no memory left, or the manager no room.
LONGEST_LINE = 1000  #: Characters of a line in the log: it has to fit in one page of a pipe.
MOST_COMPLAINTS = 100  #: Complaints about one run of the child, which may misbehave for ever.

NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""0 in a Python that was built against an older C library: then writes with it fail, as those to a terminal do."""


@dataclass(frozen=True)
class Terms:
    """What to run, and within which bounds."""

    #: Program and arguments.
    command: Sequence[str]
    #: How many descriptors may be stored; None: 4096, or as many as the limit of open files allows.
    descriptors: int | None = None
    #: How long the process may take to start, to give a sign of life and to end.
    limits: TimeLimits = field(default_factory=TimeLimits)
    #: The longest time between two starts, in seconds.
    pause: float = LONGEST_PAUSE


def keep(terms: Terms, mask: Collection[int] | None = None) -> int:
    """Run a command again and again, until a signal asks for the end; return its exit status, as a shell reports it.

    Args:
        terms: what to run, and within which bounds.
        mask: the signals that are blocked when the command starts; None for those that are blocked now.

    Raises:
        Invalid: the limit of open files is too low for so many descriptors, or a variable of the service manager that
            this process has makes no sense.
        Unavailable: the socket cannot be created.
    """
    hide()
    above = _own_manager()
    limit = make_room(terms.descriptors, above.limit if above else None)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(contextlib.closing(KeeperSignals(mask)))
        try:
            # Others could flood a socket that they reach; and the user's runtime directory is removed at logout.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cubroker-keep-"))
            path = str(Path(folder, "notify"))
            channel = stack.enter_context(sd_notify.listen(path))
        except OSError as error:
            raise Unavailable(
                f"there is no place for a socket ({explain(error)}): TMPDIR has to name a directory with a "
                "short path that can be written, such as a tmpfs"
            ) from error
        keeper = stack.enter_context(contextlib.closing(Keeper(terms, limit, path, channel, signals, above)))
        keeper.adopt(sd_notify.inherit(os.environ))
        code = keeper.run()
    if code >= 0:
        return code
    if above:  # which tells a process that was killed from one that failed
        _die(-code)
    return 128 - code


def _die(number: int) -> None:
    """End this process by a signal."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def _own_manager() -> Manager | None:
    """Return the service manager of this process; None if there is none, or not any more."""
    manager = Manager.from_environment(os.environ)
    if manager:
        try:
            manager.offer(sd_notify.status("starts"))
        except Unavailable as error:
            StderrLog(2).say(f"continues without a service manager: {error.message}")
            manager.close()
            return None
    return manager


class Keeper:
    """Keeps one process, and up to ``limit`` descriptors for it; its messages arrive at ``channel``, at ``path``.

    ``above`` is the service manager of the keeper itself, if there is one.
    """

    def __init__(
        self,
        terms: Terms,
        limit: int,
        path: str,
        channel: socket.socket,
        signals: KeeperSignals,
        above: Manager | None,
    ) -> None:
        self._terms = terms
        self._above = above
        self._next_sign = time.monotonic() if above and above.watchdog_interval else math.inf
        #: Whether what is stored here is stored by the service manager, too, and outlives the keeper.
        self._backed = above is not None and bool(above.limit)
        # SIGUSR1 asks the process to make way for the next start, which is then the service manager's.
        self._ending = ENDING | {signal.SIGUSR1} if self._backed else ENDING
        self._channel = channel
        self._log = StderrLog(2)
        self._signals = signals
        self._deferred: set[signal.Signals] = set()
        self._epoll = select.epoll()
        for source in (channel, self._signals.wakeup):
            self._epoll.register(source, select.EPOLLIN)
        self._stored = FdSet(limit, self._epoll)
        self._adopted = 0  # descriptors that this process was started with
        #: The service manager has not handled the last messages of the ended process yet.
        self._barrier: Barrier | None = None
        self._environ = {"NOTIFY_SOCKET": path, "FDSTORE": str(limit)}
        if terms.limits.watchdog:
            self._environ["WATCHDOG_USEC"] = str(round(terms.limits.watchdog * 1e6))
        if above:
            self._environ[sd_notify.ABOVE] = above.address
        self._run: Run | None = None
        self._next = NextRun(self._epoll)
        self._next_start = 0.0
        self._first = True
        self._backoff = Backoff(terms.pause)
        self._told_to_end = False
        self._status = 0
        self._over = False

    def adopt(self, inherited: Mapping[str, Sequence[int]]) -> None:
        """Store what this process was started with, in addition to ``limit``: sockets of the service manager count."""
        self._adopted = sum(map(len, inherited.values()))
        self._stored.limit += self._adopted
        for name, descriptors in inherited.items():
            for complaint in self._stored.add(name, descriptors, poll=False):
                self._log.complain(complaint)

    def run(self) -> int:
        """Keep the process until the end, and return its exit status, or minus the signal that killed it."""
        wait = True
        while not self._over:
            try:
                self._step(min(max(self._due() - time.monotonic(), 0.0), LONGEST_WAIT) if wait else 0.0)
                wait = True
            except (OSError, MemoryError) as error:  # stored descriptors must outlive a moment without memory
                self._log.complain(f"cannot continue at the moment: {error}; trying again")
                wait = False  # no further event wakes this for the work left undone
                time.sleep(RETRY_PAUSE)
        return self._status

    def _due(self) -> float:
        """Return when there is something to do even if nothing happens before."""
        if self._barrier:
            due = math.inf if self._barrier.sent else time.monotonic() + sd_notify.PAUSE
        elif self._run:
            due = min(self._run.due, self._next.due)
        else:
            due = self._next_start
        return min(due, self._next_sign)

    def close(self) -> None:
        """Close all stored descriptors, and end the process that stands by."""
        self._next.end()
        if self._barrier:
            self._barrier.close()
        self._stored.close()
        self._epoll.close()
        if self._above:
            self._above.close()

    def _step(self, wait: float) -> None:
        for descriptor, _ in self._epoll.poll(wait):
            if descriptor in self._stored:
                self._stored.drop(descriptor)
        self._hear_standby()
        self._forward_signals()
        self._receive(AT_ONCE)
        self._reap()
        now, run = time.monotonic(), self._run
        if now >= self._next_sign:
            self._give_sign(now)
        if run is None:
            if now >= self._next_start and not self._over:
                self._start(now)
            return
        if self._barrier:
            return
        if news := run.enforce(now):
            self._log.say(f"process {run.pid} {news}")
        if now >= self._next.due:
            self._start_standby(now)
        if self._told_to_end and run.phase is RunPhase.STUCK:
            self._status = -signal.SIGKILL
            self._over = True
            self._report_loss(run)

    def _give_sign(self, now: float) -> None:
        interval = (self._above and self._above.watchdog_interval) or math.inf
        self._next_sign = now + (interval if self._tell(sd_notify.WATCHDOG) else min(interval, RETRY_PAUSE))

    def _tell(self, message: str) -> bool:
        """Send a message to the service manager of the keeper, if there is one; return False if it has no room."""
        if self._above:
            with contextlib.suppress(Unavailable):
                return self._above.offer(message)
        return True

    def _hear_standby(self) -> None:
        pid, handed = self._next.pid, self._next.handed
        if news := self._next.hears():
            self._log.say(f"process {pid} {news}")
        if handed and not self._next.handed and self._run:
            self._run.restart_time(time.monotonic(), self._terms.limits)

    def _start_standby(self, now: float) -> None:
        try:
            self._next.start(
                now,
                lambda channel: child.start(
                    self._terms.command, self._environ, {}, self._signals, self._log.say, channel
                ),
            )
        except OSError as error:
            self._log.complain(f"cannot start a process that stands by: {error.strerror}")

    def _forward_signals(self) -> None:
        """Pass signals on to the process; if there is none, one that asks for the end ends the keeper.

        Other signals wait until the process is ready: before that it may have no handlers, and they would end it.
        """
        for number in self._signals.take():
            if number in self._ending:
                self._told_to_end = True
                self._over = self._run is None
                self._next.end()
                self._log.say(f"{number.name}: {'ends' if self._over else 'waits for the end of the process'}")
            if self._run and (number in self._ending or self._run.ready):
                self._forward(number, self._run)
            elif self._run:
                self._deferred.add(number)

    def _forward(self, number: signal.Signals, run: Run) -> None:
        os.kill(run.pid, number)
        if number in self._ending:
            run.stop(time.monotonic())
            os.kill(run.pid, signal.SIGCONT)  # a stopped process handles nothing

    def _receive(self, most: int) -> None:
        for _ in range(most):
            message = sd_notify.receive(self._channel)
            if message is None:
                return
            try:
                self._handle(message)
            except Malformed as error:
                close_all(message.descriptors)
                self._log.complain(f"a message of process {message.pid} is dropped: {error}")

    def _handle(self, message: Datagram) -> None:
        if self._run is None or message.pid != self._run.pid:
            raise Malformed("only the kept process may send messages; if a shell starts it, use exec there")
        fields = sd_notify.parse(message)
        if "BARRIER" in fields:
            if len(fields) > 1:
                raise Malformed("BARRIER must be the only field")
            return close_all(message.descriptors)  # which is the answer
        self._store(fields, message.descriptors)
        for news in self._run.handle(fields, time.monotonic()):
            self._log.say(f"process {self._run.pid} {news}")
        if "READY" in fields and self._run.stands_by and not self._told_to_end:
            self._next.expect(time.monotonic())
        while self._run.ready and self._deferred:
            self._forward(self._deferred.pop(), self._run)
        return None

    def _store(self, fields: dict[str, str], descriptors: list[int]) -> None:
        """Store or remove; a message that asks for both removes, as with systemd."""
        removes = fields.get("FDSTOREREMOVE") == "1"
        if fields.get("FDSTORE") == "1" and not removes:
            name, poll = fields.get("FDNAME", NAMELESS), fields.get("FDPOLL") != "0"
            for complaint in self._stored.add(name, descriptors, poll=poll):
                self._log.complain(complaint)
            return
        if descriptors or (removes and "FDNAME" not in fields):
            raise Malformed(
                "descriptors came without FDSTORE=1" if descriptors else "FDSTOREREMOVE=1 came without FDNAME"
            )
        if removes:
            self._stored.remove(fields["FDNAME"])

    def _reap(self) -> None:
        """Reap ended processes: the kept one, the one that stands by, and orphans, which process 1 inherits."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if self._run and ended.si_pid == self._run.pid:
                    if not self._is_settled():
                        return
                    self._end_run(self._run)
                else:
                    _, status = os.waitpid(ended.si_pid, 0)
                    if ended.si_pid == self._next.pid:
                        self._log.complain(f"process {ended.si_pid}, which stood by, {_how(status)}")
                        self._next.has_ended(time.monotonic())

    def _is_settled(self) -> bool:
        """Whether the service manager, if it stores the same, has handled the messages of the ended process."""
        if self._above is None or not self._backed:
            return True
        self._barrier = self._barrier or Barrier(self._above, self._epoll)
        if not self._barrier.passed():
            return False
        self._barrier.close()
        self._barrier = None
        return True

    def _end_run(self, run: Run) -> None:
        """Handle the end of the process. Until it is reaped, no other process gets its pid."""
        self._receive(LEFT_BEHIND)
        with contextlib.suppress(OSError):  # all have ended
            os.killpg(run.pid, signal.SIGKILL)  # the processes that it left running, as systemd does
        _, status = os.waitpid(run.pid, 0)
        self._run = None
        self._status = os.waitstatus_to_exitcode(status)
        self._log.say(f"process {run.pid} {_how(status)}{_last_status(run)}")
        self._tell(sd_notify.status(f"process {run.pid} {_how(status)}"))
        self._hear_standby()  # it may have taken over, and said so, before it ended
        now = time.monotonic()
        if run.pid == self._next.pid and not self._told_to_end:  # it stood by and did not take over: that was no run
            self._next.has_ended(now)
            self._next_start = now
        else:
            self._plan_next(run, now)

    def _start(self, now: float) -> None:
        again = "" if self._first else f" again, with {len(self._stored)} descriptors"
        command = shlex.join(self._terms.command)
        self._log.new_run()
        self._deferred.clear()  # a start does what the signals ask for
        if pid := self._next.hand_over(self._stored.names):
            self._run = Run(pid, now, self._terms.limits._replace(start=ANSWER))
            self._log.say(f"process {pid}, which stood by, starts{again}: {command}")
            return None
        try:
            pid = child.start(self._terms.command, self._environ, self._stored.names, self._signals, self._log.say)
        except OSError as error:
            self._log.say(f"cannot start another process: {error.strerror}")
            self._status = child.NOT_EXECUTABLE
            return self._plan_next(Run(0, now), now)
        self._run = Run(pid, now, self._terms.limits)
        self._log.say(f"process {pid} starts{again}: {command}")
        return None

    def _plan_next(self, run: Run, now: float) -> None:
        """Decide what follows: the end, if it was asked for or the first run failed with nothing stored; else a run.

        If the service manager stores the same, a run that ends with an error before it is ready is also the end: the
        manager shows the operator a service that does not start. A run that was killed counts as no such run.
        """
        hopeless = ""
        given = 0 if self._backed else self._adopted  # without a store those are sockets, which remain
        if self._first and not run.ready and len(self._stored) <= given:
            hopeless = "the first start did not get ready, and nothing is stored"
        elif self._backed and run.pid and not run.ready and self._status > 0:
            hopeless = "the start failed, and the service manager keeps what is stored"
        self._first = False
        self._over = self._told_to_end or bool(hopeless)
        if self._over:
            if not self._told_to_end:
                self._log.say(f"gives up: {hopeless}")
            elif run.phase in FORCED:
                self._report_loss(run)
            return
        delay = self._backoff.after(now - run.began)
        self._next_start = now + delay
        if delay:
            self._log.say(f"the next start comes in {delay:.2f} s; {len(self._stored)} descriptors are kept")

    def _report_loss(self, run: Run) -> None:
        """Log what is left of a process that did not end in order."""
        there = f" and is still there{_last_status(run)}" if run.phase is RunPhase.STUCK else ""
        names = f": {', '.join(self._stored.names.values())}" if len(self._stored) else ""
        fate = "left to the service manager" if self._backed else "dropped"
        self._log.say(
            f"process {run.pid} did not shut down cleanly{there}: what it lent was not given back, and "
            f"{len(self._stored)} stored descriptors are {fate}{names}"
        )


def _last_status(run: Run) -> str:
    return f" (it last said: {run.status})" if run.status else ""


def _how(status: int) -> str:
    """Say how a process ended, by its wait status."""
    code = os.waitstatus_to_exitcode(status)
    return f"ended with status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


class StderrLog:
    """Writes lines to a descriptor without ever waiting for its reader; lines that would have to wait are lost."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if os.isatty(descriptor):
            # A terminal does not support RWF_NOWAIT, and may poll as writable with room for a part of a line only.
            with contextlib.suppress(OSError):
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self._lost = 0
        self._rest = b""
        self._complaints = 0

    def say(self, text: str) -> None:
        """Write a line, and how many were lost before it, after the rest of one that a full disk cut off."""
        lost = f" (lines lost before this one: {self._lost})" if self._lost else ""
        line = "".join(c if c.isprintable() else "?" for c in text[:LONGEST_LINE])
        data = self._rest + f"cubroker keep: {line}{lost}\n".encode(errors="backslashreplace")
        try:
            written = _write(self._descriptor, data)
        except OSError:  # the reader is gone, or the disk is full
            written = 0
        if written > len(self._rest):
            self._rest, self._lost = data[written:], 0
        else:
            self._rest, self._lost = self._rest[written:], self._lost + 1

    def complain(self, text: str) -> None:
        """Write a line about the child's behaviour, up to :data:`MOST_COMPLAINTS` per run."""
        self._complaints += 1
        if self._complaints < MOST_COMPLAINTS:
            self.say(text)
        elif self._complaints == MOST_COMPLAINTS:
            self.say(f"{text}; further complaints will not be reported before the next start")

    def new_run(self) -> None:
        """Count complaints from 0 again."""
        self._complaints = 0


def _write(descriptor: int, data: bytes) -> int:
    """Write as much as there is room for; return how much. Others share the open file, so O_NONBLOCK is not set."""
    try:
        return os.pwritev(descriptor, [data], -1, NOWAIT)
    except BlockingIOError:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise
        return os.write(descriptor, data)  # XFS and btrfs never extend a file without waiting
    except OSError:  # terminals and some other files do not support the flag
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return os.write(descriptor, data) if poll.poll(0) else 0


# -- the stored descriptors ----------------------------------------------------------------------------

NAMELESS = "stored"  #: The name of a descriptor without one, or with an invalid one; as systemd calls it.

MOST_BYTES = 131072 - len("LISTEN_FDNAMES=") - 1
"""Bytes for all names together: no string of an environment may be longer (MAX_ARG_STRLEN)."""

DEFAULT_DESCRIPTORS = 4096

MOST_DESCRIPTORS = MOST_BYTES // (LONGEST_NAME + 1)
"""Descriptors whose names, however long, fit in the environment of the next run: a broker relies on the number."""

SPARE = 1024  #: Files that the child may have open in addition to those that it stored and inherited.
F_DUPFD_QUERY = 1027  #: Linux 6.10 (linux/fcntl.h; Python does not name it).
KCMP = {"x86_64": 312, "aarch64": 272}  #: The number of kcmp(2), by machine; the C library has no function for it.

_KCMP_FILE = 0

# Loaded once: before Linux 6.9 all pidfds have one inode, and a new session's is compared with those of all others.
_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long] * 6

_NAME = re.compile(r"[ -9;-~]{1,255}")

_Inode = tuple[int, int]


class FdSet:
    """Up to ``limit`` stored descriptors. ``epoll`` reports those that hang up; its other events are the caller's."""

    def __init__(self, limit: int, epoll: select.epoll) -> None:
        self.limit = limit
        self._epoll = epoll
        #: The name of each descriptor, in the order of their arrival; callers only read it.
        self.names: dict[int, str] = {}
        self._inodes: dict[int, _Inode] = {}
        self._by_inode: dict[_Inode, list[int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self.names

    def add(self, name: str | None, descriptors: Sequence[int], *, poll: bool) -> list[str]:
        """Store descriptors, and return complaints. Duplicates, and those without room, are closed."""
        complaints = []
        if name is None or not _NAME.fullmatch(name):
            complaints.append(f"{name!r} is no name for a descriptor, so it is kept as {NAMELESS!r}")
            name = NAMELESS
        dropped = 0
        for descriptor in descriptors:
            inode = _inode(descriptor)
            if any(same_file(descriptor, known) for known in self._by_inode.get(inode, ())):
                close_all([descriptor])
            elif len(self) >= self.limit or self._bytes + len(name) + 1 > MOST_BYTES:
                close_all([descriptor])
                dropped += 1
            else:
                self.names[descriptor] = name
                self._inodes[descriptor] = inode
                self._by_inode.setdefault(inode, []).append(descriptor)
                self._bytes += len(name) + 1
                complaints += self._watch(descriptor, name) if poll else ()
        if dropped:
            complaints.append(
                f"THE STORE IS FULL with {len(self)} of {self.limit} descriptors and {self._bytes} of {MOST_BYTES} "
                f"bytes of names: {dropped} named {name!r} are dropped, and will be missing after a restart"
            )
        return complaints

    def remove(self, name: str) -> None:
        """Close all descriptors of a name."""
        for descriptor in [known for known, called in self.names.items() if called == name]:
            self.drop(descriptor)

    def drop(self, descriptor: int) -> None:
        """Close one descriptor."""
        self._bytes -= len(self.names.pop(descriptor)) + 1
        inode = self._inodes.pop(descriptor)
        self._by_inode[inode].remove(descriptor)
        if not self._by_inode[inode]:
            del self._by_inode[inode]
        with contextlib.suppress(OSError):  # it was not polled
            self._epoll.unregister(descriptor)  # close() does not do that while others have the same file open
        close_all([descriptor])

    def close(self) -> None:
        """Close all."""
        for descriptor in list(self.names):
            self.drop(descriptor)

    def _watch(self, descriptor: int, name: str) -> Sequence[str]:
        try:
            self._epoll.register(descriptor, 0)  # hang-ups and errors are always reported
        except PermissionError:
            pass  # a kind of file that never hangs up
        except OSError as error:
            return [f"{name!r} cannot be watched for a hangup ({error.strerror}), so it stays until removed"]
        return ()


def make_room(descriptors: int | None, above: int | None = None) -> int:
    """Raise the limit of open files, the child's too, for that many stored descriptors; return their number.

    The child inherits all of them and may have opened as many others, hence twice as many. None stands for 4096, or as
    many as the limit allows. A service manager of the keeper that stores ``above`` descriptors lowers the number, and
    stands for it. Raises ``Invalid`` if the limit cannot be raised so far, or the child cannot inherit all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 2**31
    most = (hard - SPARE) // 2
    limit = min(above or DEFAULT_DESCRIPTORS, most, MOST_DESCRIPTORS) if descriptors is None else descriptors
    needed = 2 * max(limit, 1) + SPARE
    if not 0 < limit <= most:
        fewer = f", or keep at most {most} with --descriptors" if most > 0 else ""
        raise Invalid(
            f"to keep {max(limit, 1)} descriptors takes a limit of {needed} open files, and it cannot be raised"
            f" above {hard}: raise that (ulimit -Hn, LimitNOFILE=){fewer}"
        )
    if limit > MOST_DESCRIPTORS:
        raise Invalid(
            f"{limit} descriptors cannot be handed to the next run: their names have to fit in {MOST_BYTES} bytes of"
            f" its environment; keep at most {MOST_DESCRIPTORS} with --descriptors"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return min(limit, above) if above else limit


def _inode(descriptor: int) -> _Inode:
    """Return the inode of a descriptor, so that few files have to be compared; (0, 0) if it has none."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors share an open file, and not merely an inode; False if the kernel does not tell."""
    try:
        return bool(fcntl.fcntl(one, F_DUPFD_QUERY, other))
    except OSError:
        return same_by_comparison(one, other)


def same_by_comparison(one: int, other: int) -> bool:
    """Compare by kcmp(2), for kernels before 6.10; False if a container forbids that call."""
    call = KCMP.get(platform.machine())
    if call is None:
        return False
    pid = os.getpid()
    return bool(_syscall(call, pid, pid, _KCMP_FILE, one, other) == 0)
