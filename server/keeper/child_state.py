"""One run of the kept process: its phase, its messages and its time limits; and the pause before the next run.

Each phase has a limit, as those of a systemd service have (TimeoutStartSec, WatchdogSec, TimeoutStopSec)::

    STARTING ---READY---> SERVING ---STOPPING or told to end---> STOPPING
        |                    |                                      |
        | limits.start       | limits.watchdog                      | limits.stop
        v                    v                                      v
     ABORTED <---------------+--------------- ABORTING --------> KILLED --- UNKILLABLE ---> STUCK

A process that hangs while it starts or serves gets SIGABRT first, so that it can say where it hangs. A process that was
told to end and does not gets SIGKILL. A process that is there after SIGKILL hangs in the kernel.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

ABORTING = 5.0  #: Seconds that a hung process has, after SIGABRT, to say where it hangs; then comes SIGKILL.
UNKILLABLE = 10.0  #: Seconds after SIGKILL until a process counts as stuck in the kernel, as in a driver that hangs.
LATE = 0.1  #: Part of a limit by which the keeper itself may be late. If it is later, the machine stood still.
STEADY = 10.0  #: Seconds that a run must have lasted for its end to be followed by a start at once.
FIRST_PAUSE = 0.05  #: Seconds after the second of several short runs in a row, doubled after each that follows.
LONGEST_PAUSE = 5.0


class Limits(NamedTuple):
    """Seconds that a process has; None: any number.

    Not to be confused with :class:`cubroker.server.ledger.policy.Limits`.
    """

    #: Until it says that it is ready.
    start: float | None = None
    #: Between two signs of life while it serves.
    watchdog: float | None = None
    #: To end, once it was told to, or has said that it does.
    stop: float | None = None


class Phase(Enum):
    """The phase of a process; see above.

    Not to be confused with :class:`cubroker.server.ledger.model.Phase`.
    """

    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()
    ABORTED = auto()
    KILLED = auto()
    STUCK = auto()


FORCED = frozenset({Phase.ABORTED, Phase.KILLED, Phase.STUCK})  #: Phases of a process whose time was over.

# Without SIGCONT a stopped process would not handle SIGABRT.
OVERDUE: Mapping[Phase, tuple[Phase, Sequence[signal.Signals], str]] = {
    Phase.STARTING: (Phase.ABORTED, [signal.SIGABRT, signal.SIGCONT], "is not ready after {:g} s, and is aborted"),
    Phase.SERVING: (Phase.ABORTED, [signal.SIGABRT, signal.SIGCONT], "gave no sign of life in time, and is aborted"),
    Phase.STOPPING: (Phase.KILLED, [signal.SIGKILL], "does not end, and is killed"),
    Phase.ABORTED: (Phase.KILLED, [signal.SIGKILL], "does not end, and is killed"),
    Phase.KILLED: (Phase.STUCK, [], "is still there {:g} s after SIGKILL: it hangs in the kernel"),
}
"""What follows a phase whose time is over: the next phase, the signals that are sent, and what the log says."""


@dataclass
class Run:
    """A process from its start to its end. All times are seconds of the monotonic clock."""

    pid: int
    #: When it was started.
    began: float
    #: How long each phase may take.
    limits: Limits = field(default_factory=Limits)
    phase: Phase = Phase.STARTING
    #: It has said that it serves.
    ready: bool = False
    #: The last status that it sent.
    status: str = ""
    #: When :meth:`enforce` acts next.
    due: float = field(init=False)
    _granted: float = field(init=False)

    def __post_init__(self) -> None:
        self._enter(Phase.STARTING, self.began)

    def handle(self, fields: Mapping[str, str], now: float) -> list[str]:
        """Take in a message of the process, and return what is worth a line in the log."""
        news = []
        self.status = fields.get("STATUS", self.status)
        if (watchdog := _seconds(fields, "WATCHDOG_USEC")) is not None:
            self.limits = self.limits._replace(watchdog=watchdog or None)
            self._prove_life(now)
        if fields.get("RELOADING") == "1":
            news.append("reads its settings again")
        if fields.get("READY") == "1":
            self.ready = True
            if self.phase in (Phase.STARTING, Phase.SERVING):
                self._enter(Phase.SERVING, now)
            news.append("is ready")
        if fields.get("WATCHDOG") == "1":
            self._prove_life(now)
        if fields.get("WATCHDOG") == "trigger" and self.phase in (Phase.STARTING, Phase.SERVING):
            self.due = now
        if fields.get("STOPPING") == "1":
            self.stop(now)
            news.append("is about to end")
        extension = _seconds(fields, "EXTEND_TIMEOUT_USEC")
        if extension and self.phase in (Phase.STARTING, Phase.STOPPING) and now + extension > self.due:
            self._granted, self.due = extension, now + extension
        return news

    def stop(self, now: float) -> None:
        """Begin the time that the process has to end, unless it has begun."""
        if self.phase in (Phase.STARTING, Phase.SERVING):
            self._enter(Phase.STOPPING, now)

    def enforce(self, now: float) -> str | None:
        """End a process whose time is over, and return what was done, if anything was."""
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
        if self.phase is Phase.SERVING:
            self._enter(Phase.SERVING, now)

    def _enter(self, phase: Phase, now: float) -> None:
        """Begin a phase, or begin its time anew."""
        self.phase = phase
        limits = {
            Phase.STARTING: self.limits.start,
            Phase.SERVING: self.limits.watchdog,
            Phase.STOPPING: self.limits.stop,
            Phase.ABORTED: ABORTING,
            Phase.KILLED: UNKILLABLE,
            Phase.STUCK: None,
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
