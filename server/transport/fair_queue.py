"""Does expensive work in short steps: users take turns, and cheap requests wait for one step at most.

Work is expensive if it takes a millisecond or more: checking a layout, listing a thousand pools, sending a layout of
megabytes. It runs on the broker's loop all the same, where it needs no locks and does not compete with another thread
for the interpreter. After a step the loop does its other work, for at least as long as the step took if there is that
much, and then the next step. Each turn goes to the user who has used the least loop time. The sessions of a user take
turns, job by job. The jobs of one session run in the order of their arrival, and are dropped when the session ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Hashable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from cubroker.server.event_queue import EventQueue, TurnDue
from cubroker.server.ledger.events import RequestReceived, Respond

QUANTUM = 0.001  #: Seconds after which a step is over, if its job has come to a ``yield``.
IDLE_ROUND = 0.0001  #: Seconds that a round of the loop takes with next to nothing to do.

Outcome = RequestReceived | Respond
"""What a job may lead to: a request for the ledger, or a reply that needs no decision."""

Job = Generator[None, None, Outcome | None]
"""Work that may be interrupted wherever it yields."""


@dataclass(slots=True)
class _Current:
    """The job that a user's turns are spent on until it is done."""

    owner: Hashable
    number: int
    job: Job


@dataclass(slots=True, eq=False)
class _User:
    """The jobs of one user."""

    #: Seconds of the loop's time that the user has used.
    spent: float
    #: The jobs that wait, by session, the next session first, and by request.
    lines: dict[Hashable, dict[int, Job]] = field(default_factory=dict)
    #: The job under way. A user has one at most, and so the memory of one unfinished job.
    current: _Current | None = None

    @property
    def idle(self) -> bool:
        return self.current is None and not self.lines

    def step(self, until: float) -> Outcome | None:
        """Run the current job to its end, or past ``until``; return what it led to."""
        current = self.current = self.current or self._next()
        try:
            while True:
                next(current.job)
                if perf_counter() >= until or self.current is not current:  # or its session ended in this step
                    return None
        except StopIteration as end:
            self.current = None
            outcome: Outcome | None = end.value
            return outcome
        except BaseException:
            self.current = None
            raise

    def _next(self) -> _Current:
        owner = next(iter(self.lines))
        line = self.lines.pop(owner)
        number = next(iter(line))
        job = line.pop(number)
        if line:
            self.lines[owner] = line
        return _Current(owner, number, job)


class FairQueue:
    """The expensive jobs of all users, and whose turn it is.

    Args:
        queue: gets :class:`~cubroker.server.event_queue.TurnDue` whenever the next :meth:`step` should be made.
        loop: the event loop of ``queue``.

    Attributes:
        paused: whether steps are suspended.
    """

    def __init__(self, queue: EventQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = queue
        self._loop = loop
        self._users: dict[int, _User] = {}
        self._now = 0.0  # the loop time that the user of the last step had used before it
        self._armed = False
        self.paused = False
        self._round = 0.0  # when the last round of the loop began, or the step in it ended
        self._due = 0.0  # when the loop's other work has had as long as the last step

    def put(self, uid: int, owner: Hashable, number: int, job: Job) -> None:
        """Add a job for request ``number`` of a session; it begins immediately if this round of the loop had no step.

        A request has one job at a time: a second one is dropped.
        """
        if self.has(uid, owner, number):
            return
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User(self._now)
        user.lines.setdefault(owner, {})[number] = job
        if not self._armed and not self.paused:
            self._arm()
            self._queue.put(TurnDue())

    def has(self, uid: int, owner: Hashable, number: int) -> bool:
        """Whether a job of the request waits or was interrupted."""
        user = self._users.get(uid)
        if user is None:
            return False
        current = user.current
        if number in user.lines.get(owner, ()):
            return True
        return current is not None and (current.owner, current.number) == (owner, number)

    def step(self) -> Iterator[Outcome]:
        """Make the next step; if a job ends in it, yield the job's outcome.

        The time that the caller spends on the outcome, until it resumes this iterator, counts for the job's user.
        """
        if not self._users or self.paused:
            return
        if not self._armed:
            self._arm()
        uid, user = min(self._users.items(), key=lambda item: item[1].spent)
        self._now, began = user.spent, perf_counter()
        try:
            if (outcome := user.step(began + QUANTUM)) is not None:
                yield outcome
        finally:
            self._round = ended = perf_counter()
            self._due = ended + ended - began
            user.spent += ended - began
            if user.idle and self._users.get(uid) is user:
                del self._users[uid]

    def drop(self, uid: int, owner: Hashable) -> None:
        """Drop the jobs of a session."""
        user = self._users.get(uid)
        if user is None:
            return
        user.lines.pop(owner, None)
        if user.current and user.current.owner == owner:
            user.current = None
        if user.idle:
            del self._users[uid]

    def pause(self) -> None:
        """Make no step until :meth:`resume`."""
        self.paused = True

    def resume(self) -> None:
        """Make steps again."""
        self.paused = False
        if self._users and not self._armed:
            self._arm()

    def close(self) -> None:
        """Drop all jobs."""
        self._users.clear()

    def _arm(self) -> None:
        self._armed = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Schedule the next step after an idle round, or once other work has had as long as the last step."""
        began, self._round = self._round, perf_counter()
        if self._round - began > IDLE_ROUND and self._round < self._due:
            self._loop.call_soon(self._look)
        else:
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._armed = False
        if self._users and not self.paused:
            self._queue.put(TurnDue())
