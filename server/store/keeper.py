"""A supervisor of one process, small enough to be trusted with what must outlive it: ``cubroker keep``.

It answers what systemd's notify protocol asks, keeps the descriptors that the process stores, and starts it again with
them when it ends. It has one thread, waits in one place, and works off there whatever came, in an order that matters:
hang-ups before messages, which may bring descriptors with the numbers of those that hung up; messages before the end of
the process, whose last ones count.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cubroker.server.hiding import hide
from cubroker.server.store import child, datagrams
from cubroker.server.store.datagrams import Datagram, Malformed, close_all
from cubroker.server.store.kept import NAMELESS, Kept
from cubroker.server.store.pace import LONGEST_PAUSE, Pace
from cubroker.server.store.premises import listening, make_room
from cubroker.server.store.remarks import Remarks
from cubroker.server.store.runs import FORCED, Limits, Phase, Run
from cubroker.server.store.signals import ENDING, Signals

AT_ONCE = 512
"""Messages that are taken before signals and the watchdog have their turn."""

LEFT_BEHIND = 65536
"""Messages that are looked for once the child has ended: more than wait in any queue, but some end to a flood."""

LONGEST_WAIT = 3600.0

BREATH = 0.1
"""Seconds before the next attempt when the machine has no memory left."""


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Terms:
    """What is kept, and how.

    Attributes:
        command: program and arguments.
        descriptors: how many may be stored.
        limits: how long the process may take to start, to give a sign of life and to end.
        pause: the longest time between two starts, in seconds.
    """

    command: Sequence[str]
    descriptors: int
    limits: Limits = NO_LIMITS
    pause: float = LONGEST_PAUSE


def keep(
    command: Sequence[str],
    *,
    descriptors: int | None,
    limits: Limits = NO_LIMITS,
    pause: float = LONGEST_PAUSE,
    mask: Collection[int] | None = None,
) -> int:
    """Run a command again and again, until a signal asks for the end; return its exit status, as a shell has it.

    Args:
        command: as all but ``mask`` one of :class:`Terms`.
        descriptors: None: 4096, or as many as the limit of open files allows.
        limits: seconds.
        pause: seconds.
        mask: signals that the command finds blocked; None: those that are blocked now.

    Raises:
        Invalid: the limit of open files is too low for so many descriptors.
        Unavailable: there is no place for the socket.
    """
    hide()
    terms = Terms(command, make_room(descriptors), limits, pause)
    with (
        contextlib.closing(Signals(mask)) as signals,
        listening() as (path, channel),
        contextlib.closing(Keeper(terms, path, channel, signals)) as keeper,
    ):
        return keeper.run()


class Keeper:
    """Keeps one process.

    Args:
        terms: what, and how.
        path: of ``channel``.
        channel: where messages arrive.
        signals: those that this process gets.
    """

    def __init__(self, terms: Terms, path: str, channel: socket.socket, signals: Signals) -> None:
        self._terms = terms
        self._channel = channel
        self._remarks = Remarks(2)
        self._signals = signals
        self._deferred: set[signal.Signals] = set()
        self._epoll = select.epoll()
        for source in (channel, self._signals.bell):
            self._epoll.register(source, select.EPOLLIN)
        self._kept = Kept(terms.descriptors, self._epoll, self._remarks.complain)
        self._environ = {"NOTIFY_SOCKET": path, "FDSTORE": str(terms.descriptors)}
        if terms.limits.watchdog:
            self._environ["WATCHDOG_USEC"] = str(round(terms.limits.watchdog * 1e6))
        self._run: Run | None = None
        self._next = 0.0
        self._first = True
        self._pace = Pace(terms.pause)
        self._told = False
        self._status = 0
        self._over = False

    def run(self) -> int:
        """Keep the process until the end, and return its exit status."""
        wait = True
        while not self._over:
            try:
                self._turn(self._patience() if wait else 0.0)
                wait = True
            except (OSError, MemoryError) as error:  # what is stored must outlive a moment without memory
                self._remarks.complain(f"cannot go on at the moment: {error}")
                wait = False  # the bell that rang for what is still undone will not ring again
                time.sleep(BREATH)
        return self._status

    def close(self) -> None:
        """Close all that is stored."""
        self._kept.close()
        self._epoll.close()

    def _turn(self, wait: float) -> None:
        for descriptor, _ in self._epoll.poll(wait):
            if descriptor in self._kept:
                self._kept.drop(descriptor)
        self._forward()
        self._receive(AT_ONCE)
        self._reap()
        now = time.monotonic()
        if self._run is None:
            if now >= self._next and not self._over:
                self._start(now)
        else:
            self._watch(self._run, now)

    def _watch(self, run: Run, now: float) -> None:
        if news := run.watch(now):
            self._remarks.say(f"process {run.pid} {news}")
        if self._told and run.phase is Phase.STUCK:
            self._status = 128 + signal.SIGKILL
            self._over = True
            self._report_loss(run)

    def _patience(self) -> float:
        due = self._run.due if self._run else self._next
        return min(max(due - time.monotonic(), 0.0), LONGEST_WAIT)

    def _forward(self) -> None:
        """Pass signals on to the process; without one, those that ask for the end are answered here.

        The others wait until the process is ready: before that it may not have handlers, and they would end it.
        """
        for number in self._signals.take():
            if number in ENDING:
                self._told = True
                self._over = self._run is None
                self._remarks.say(f"{number.name}: {'ends' if self._over else 'waits for the end of the process'}")
            if self._run and (number in ENDING or self._run.ready):
                self._pass_on(number, self._run)
            elif self._run:
                self._deferred.add(number)

    def _pass_on(self, number: signal.Signals, run: Run) -> None:
        os.kill(run.pid, number)
        if number in ENDING:
            run.stop(time.monotonic())
            os.kill(run.pid, signal.SIGCONT)  # a stopped process handles nothing

    def _receive(self, most: int) -> None:
        for _ in range(most):
            message = datagrams.receive(self._channel)
            if message is None:
                return
            try:
                self._heed(message)
            except Malformed as error:
                close_all(message.descriptors)
                self._remarks.complain(f"a message of process {message.pid} is dropped: {error}")

    def _heed(self, message: Datagram) -> None:
        if self._run is None or message.pid != self._run.pid:
            raise Malformed("only the process that is kept has a say; if a shell started it, let that exec it")
        fields = datagrams.parse(message)
        if "BARRIER" in fields:
            if len(fields) > 1:
                raise Malformed("BARRIER has to come alone")
            return close_all(message.descriptors)  # which is the answer
        self._keep(fields, message.descriptors)
        for news in self._run.heed(fields, time.monotonic()):
            self._remarks.say(f"process {self._run.pid} {news}")
        while self._run.ready and self._deferred:
            self._pass_on(self._deferred.pop(), self._run)
        return None

    def _keep(self, fields: dict[str, str], descriptors: list[int]) -> None:
        """Store or remove; a message that asks for both is one that removes, as systemd has it."""
        removes = fields.get("FDSTOREREMOVE") == "1"
        if fields.get("FDSTORE") == "1" and not removes:
            return self._kept.add(fields.get("FDNAME", NAMELESS), descriptors, poll=fields.get("FDPOLL") != "0")
        if descriptors or (removes and "FDNAME" not in fields):
            raise Malformed("descriptors came without FDSTORE=1" if descriptors else "it removes nothing by name")
        if removes:
            self._kept.remove(fields["FDNAME"])
        return None

    def _reap(self) -> None:
        """Take note of ended processes: the one that is kept, and orphans, which are children of the first process."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if self._run and ended.si_pid == self._run.pid:
                    self._bury(self._run)
                else:
                    os.waitpid(ended.si_pid, 0)

    def _bury(self, run: Run) -> None:
        """Go on after the process's end. Until it is reaped nobody else has its number."""
        self._receive(LEFT_BEHIND)
        with contextlib.suppress(OSError):  # all have ended
            os.killpg(run.pid, signal.SIGKILL)  # what it started and left running, as a service's is
        _, status = os.waitpid(run.pid, 0)
        self._run = None
        code = os.waitstatus_to_exitcode(status)
        self._status = code if code >= 0 else 128 - code
        how = f"ended with status {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        self._remarks.say(f"process {run.pid} {how}{_last_words(run)}")
        self._go_on(run, time.monotonic())

    def _start(self, now: float) -> None:
        again = "" if self._first else f" again, with {len(self._kept)} descriptors"
        self._remarks.forgive()
        self._deferred.clear()  # what they ask for comes with a start
        try:
            pid = child.start(self._terms.command, self._environ, self._kept.names, self._signals, self._remarks)
        except OSError as error:
            self._remarks.say(f"there cannot be another process: {error.strerror}")
            self._status = child.NOT_EXECUTABLE
            return self._go_on(Run(0, now), now)
        self._run = Run(pid, now, self._terms.limits)
        self._remarks.say(f"process {pid} starts{again}: {shlex.join(self._terms.command)}")
        return None

    def _go_on(self, run: Run, now: float) -> None:
        """Decide what follows a run: nothing, if that was asked for or nothing was ever won, else the next one."""
        hopeless = self._first and not run.ready and not len(self._kept)
        self._first = False
        self._over = self._told or hopeless
        if self._over:
            if not self._told:
                self._remarks.say("gives up: the first start did not get ready, and nothing is stored")
            elif run.phase in FORCED:
                self._report_loss(run)
            return
        delay = self._pace.after(now - run.began)
        self._next = now + delay
        if delay:
            self._remarks.say(f"the next start comes in {delay:.2f} s; {len(self._kept)} descriptors are kept")

    def _report_loss(self, run: Run) -> None:
        """Say what is left where the process did not end in order."""
        there = f" and is still there{_last_words(run)}" if run.phase is Phase.STUCK else ""
        names = f": {', '.join(self._kept.names.values())}" if len(self._kept) else ""
        self._remarks.say(
            f"process {run.pid} did not end in order{there}: what it lent was not given back, and "
            f"{len(self._kept)} stored descriptors are dropped{names}"
        )


def _last_words(run: Run) -> str:
    return f" (it last said: {run.status})" if run.status else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"
