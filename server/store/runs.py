"""One run of the kept process: its phase, what it said of itself, and when its time is over.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

ABORTING = 5.0
"""Seconds that a hung process has, after SIGABRT, to say where it hangs; then comes SIGKILL."""

UNKILLABLE = 10.0
"""Seconds after SIGKILL from which on a process counts as stuck in the kernel, as in a driver that hangs."""

LATE = 0.1
"""Part of a limit by which the keeper may itself be late: more, and the machine, or both, stood still."""


class Limits(NamedTuple):
    """Seconds that a process has; None: any number.

    Attributes:
        start: until it says that it is ready.
        watchdog: between two signs of life while it serves.
        stop: to end, once it was told to, or has said that it does.
    """

    start: float | None = None
    watchdog: float | None = None
    stop: float | None = None


class Phase(Enum):
    """What a process is doing."""

    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()
    ABORTED = auto()
    KILLED = auto()
    STUCK = auto()


FORCED = frozenset({Phase.ABORTED, Phase.KILLED, Phase.STUCK})
"""Phases of a process whose time was over."""


@dataclass
class Run:
    """A process from its start to its end.

    Attributes:
        pid: of the process.
        began: when it was started, in seconds of the monotonic clock, as all times here.
        limits: how long each phase may take.
        phase: what the process is doing.
        ready: it has said that it serves.
        status: what it last said of itself.
        due: when :meth:`watch` acts next.
    """

    pid: int
    began: float
    limits: Limits = field(default_factory=Limits)
    phase: Phase = Phase.STARTING
    ready: bool = False
    status: str = ""
    due: float = field(init=False)
    _granted: float = field(init=False)

    def __post_init__(self) -> None:
        self._enter(Phase.STARTING, self.began)

    def heed(self, fields: Mapping[str, str], now: float) -> list[str]:
        """Take in what the process says of itself, and return what is worth a line."""
        news = []
        self.status = fields.get("STATUS", self.status)
        if (watchdog := _seconds(fields, "WATCHDOG_USEC")) is not None:
            self.limits = self.limits._replace(watchdog=watchdog or None)
            self._prove_life(now)
        if fields.get("RELOADING") == "1":
            news.append("reads its settings again")
        if fields.get("READY") == "1":
            self._begin_to_serve(now)
            news.append("is ready")
        if fields.get("WATCHDOG") == "1":
            self._prove_life(now)
        if fields.get("WATCHDOG") == "trigger" and self.phase in (Phase.STARTING, Phase.SERVING):
            self.due = now
        if fields.get("STOPPING") == "1":
            self.stop(now)
            news.append("is about to end")
        if extension := _seconds(fields, "EXTEND_TIMEOUT_USEC"):
            self._extend(extension, now)
        return news

    def stop(self, now: float) -> None:
        """Give the process its time to end, once however often it is told to."""
        if self.phase in (Phase.STARTING, Phase.SERVING):
            self._enter(Phase.STOPPING, now)

    def watch(self, now: float) -> str | None:
        """End a process whose time is over, and return what was done, if anything was.

        SIGABRT is followed by SIGCONT, without which a stopped process would not handle it.
        """
        if now < self.due:
            return None
        match self.phase:
            case Phase.STARTING | Phase.SERVING | Phase.STOPPING if now - self.due > LATE * self._granted:
                self._enter(self.phase, now)
                return None
            case Phase.STARTING:
                return self._abort(f"is not ready after {self._granted:g} s", now)
            case Phase.SERVING:
                return self._abort("gave no sign of life in time", now)
            case Phase.STOPPING | Phase.ABORTED:
                self._enter(Phase.KILLED, now)
                os.kill(self.pid, signal.SIGKILL)
                return "does not end, and is killed"
            case Phase.KILLED | Phase.STUCK:
                self._enter(Phase.STUCK, now)
                return f"is still there {UNKILLABLE:g} s after SIGKILL: it hangs in the kernel"

    def _begin_to_serve(self, now: float) -> None:
        self.ready = True
        if self.phase is Phase.STARTING:
            self._enter(Phase.SERVING, now)
        self._prove_life(now)

    def _prove_life(self, now: float) -> None:
        if self.phase is Phase.SERVING:
            self._enter(Phase.SERVING, now)

    def _extend(self, seconds: float, now: float) -> None:
        """Let a start or an end take ``seconds`` from now on, if its limit leaves it less."""
        if self.phase in (Phase.STARTING, Phase.STOPPING) and now + seconds > self.due:
            self._granted, self.due = seconds, now + seconds

    def _abort(self, why: str, now: float) -> str:
        self._enter(Phase.ABORTED, now)
        os.kill(self.pid, signal.SIGABRT)
        os.kill(self.pid, signal.SIGCONT)
        return f"{why}, and is aborted"

    def _enter(self, phase: Phase, now: float) -> None:
        """Begin a phase, or the time that it may take anew."""
        self.phase = phase
        self._granted = self._limit()
        self.due = now + self._granted

    def _limit(self) -> float:
        limits = {
            Phase.STARTING: self.limits.start,
            Phase.SERVING: self.limits.watchdog,
            Phase.STOPPING: self.limits.stop,
            Phase.ABORTED: ABORTING,
            Phase.KILLED: UNKILLABLE,
            Phase.STUCK: None,
        }
        return limits[self.phase] or math.inf


def _seconds(fields: Mapping[str, str], name: str) -> float | None:
    """Return a field with microseconds in seconds; None if it is absent or no number."""
    value = fields.get(name, "")
    return int(value) / 1e6 if re.fullmatch("[0-9]{1,18}", value) else None
