"""One run of the kept process: what it said of itself, and when its watchdog is due."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

ABORTING = 5.0
"""Seconds that a hung process has, after SIGABRT, to say where it hangs; then comes SIGKILL."""

LATE = 0.1
"""Part of a watchdog's time by which the keeper may itself be late: more, and the machine, or both, stood still."""


@dataclass
class Run:
    """A process from its start to its end.

    Attributes:
        pid: of the process.
        began: when it was started, in seconds of the monotonic clock, as all times here.
        patience: seconds that the watchdog waits for the next sign of life; None: it does not watch.
        ready: it has said that it serves.
        status: what it last said of itself.
        due: when the watchdog acts next.
        aborted: the watchdog has acted.
    """

    pid: int
    began: float
    patience: float | None
    ready: bool = False
    status: str = ""
    due: float = math.inf
    aborted: bool = False

    def heed(self, fields: Mapping[str, str], now: float) -> list[str]:
        """Take in what the process says of itself, and return what is worth a line."""
        news = []
        self.status = fields.get("STATUS", self.status)
        if re.fullmatch("[0-9]{1,18}", fields.get("WATCHDOG_USEC", "")):
            self.patience = int(fields["WATCHDOG_USEC"]) / 1e6 or None
            self.wait(now)
        if fields.get("RELOADING") == "1":
            news.append("reads its settings again")
        if fields.get("READY") == "1":
            self.ready = True
            self.wait(now)
            news.append("is ready")
        if fields.get("WATCHDOG") == "1":
            self.wait(now)
        if fields.get("WATCHDOG") == "trigger":
            self.due = now
        if fields.get("STOPPING") == "1":
            self.leave()
            news.append("is about to end")
        return news

    def wait(self, now: float) -> None:
        """Wait for the next sign of life. Nobody waits for a process before it serves, or once it was aborted."""
        if not self.aborted:
            self.due = now + self.patience if self.patience and self.ready else math.inf

    def leave(self) -> None:
        """Let the process take its time to end."""
        self.patience = None
        if not self.aborted:
            self.due = math.inf

    def watch(self, now: float) -> str | None:
        """End a process that gave no sign of life in time, and return what was done, if anything was.

        It is aborted so that it can say where it hangs, continued if it is stopped, and killed if that does not help.
        """
        if now < self.due:
            return None
        if self.aborted:
            self.due = math.inf
            os.kill(self.pid, signal.SIGKILL)
            return "does not end, and is killed"
        if self.patience and now - self.due > LATE * self.patience:
            self.wait(now)
            return None
        self.aborted = True
        self.due = now + ABORTING
        os.kill(self.pid, signal.SIGABRT)
        os.kill(self.pid, signal.SIGCONT)
        return "gave no sign of life in time, and is aborted"
