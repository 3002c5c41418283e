"""Dear work in short steps: users take turns, and cheap requests wait for one step at most.

Work is dear if it takes a millisecond or more: checking a layout, listing a thousand pools, sending a layout of
megabytes. It is done on the broker's loop all the same, where it needs no locks and has no thread to fight with over
the interpreter: one step, then whatever else the loop has to do, for as long as the step took at least if there is so
much, then the next step. The turn is the user's who has
had the least of the loop's time, and within a user the sessions take turns, each from one job to the next. The jobs of
a session are done in the order in which they came. A session that ends takes its jobs with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate
from time import perf_counter

QUANTUM = 0.001
"""Seconds after which a step is over, if its job has come to a ``yield``."""

NOTHING = 0.0001
"""Seconds that a round of the loop takes in which nothing was to be done, or next to nothing."""

Job = Generator[None, None, None]
"""Work that may be interrupted wherever it yields."""


@dataclass(slots=True)
class _Current:
    """The job that a user's turns are spent on until it is done."""

    owner: Hashable
    number: int
    job: Job


@dataclass(slots=True, eq=False)
class _User:
    """The jobs of one user: by session, whose turn is next first, and by request.

    One of them is under way, so that what they take in between is taken once for each user.
    """

    spent: float
    lines: dict[Hashable, dict[int, Job]] = field(default_factory=dict)
    current: _Current | None = None

    @property
    def idle(self) -> bool:
        return self.current is None and not self.lines

    def step(self, until: float) -> None:
        current = self.current = self.current or self._next()
        try:
            for _ in current.job:
                if perf_counter() >= until or self.current is not current:  # or its session ended with this step
                    return
        except BaseException:
            self.current = None
            raise
        self.current = None

    def _next(self) -> _Current:
        owner = next(iter(self.lines))
        line = self.lines.pop(owner)
        number = next(iter(line))
        job = line.pop(number)
        if line:
            self.lines[owner] = line
        return _Current(owner, number, job)


class Turns:
    """Dear work that waits, and whose turn it is.

    Args:
        soon: has the loop call a function in its next round.
        after: called after each step that the loop made.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], after: Callable[[], None]) -> None:
        self._soon = soon
        self._after = after
        self._users: dict[int, _User] = {}
        self._now = 0.0  # what the user had had of the loop's time who was served last
        self._armed = False
        self._paused = False
        self._round = 0.0  # when the last round of the loop began, or the step in it ended
        self._due = 0.0  # when the rest had as long as the last step

    def put(self, uid: int, owner: Hashable, number: int, job: Job) -> None:
        """Have a job done for request ``number`` of a session, at once if there was no dear work in this round.

        A request has one job at a time: a second one is dropped, unless the first puts it, which is done then.
        """
        if self.has(uid, owner, number):
            return
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User(self._now)
        user.lines.setdefault(owner, {})[number] = job
        if not self._armed and not self._paused:
            self._arm()
            self._step()

    def has(self, uid: int, owner: Hashable, number: int) -> bool:
        """Whether a request's job waits or was interrupted; one that asks this itself is neither."""
        user = self._users.get(uid)
        if user is None:
            return False
        current = user.current
        if number in user.lines.get(owner, ()):
            return True
        if current is None or getgeneratorstate(current.job) == GEN_RUNNING:
            return False
        return (current.owner, current.number) == (owner, number)

    def drop(self, uid: int, owner: Hashable) -> None:
        """Do nothing more for a session."""
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
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        if self._users and not self._armed:
            self._arm()

    def close(self) -> None:
        """Do nothing more for anybody."""
        self._users.clear()

    def _arm(self) -> None:
        self._armed = True
        self._soon(self._look)

    def _look(self) -> None:
        """Make the next step once a round of the loop had nothing to do, or the rest had as long as the last step."""
        began, self._round = self._round, perf_counter()
        if self._round - began > NOTHING and self._round < self._due:
            self._soon(self._look)
        else:
            self._soon(self._turn)

    def _turn(self) -> None:
        self._armed = False
        if self._users and not self._paused:
            self._arm()
            try:
                self._step()
            finally:
                self._after()

    def _step(self) -> None:
        uid, user = min(self._users.items(), key=lambda item: item[1].spent)
        self._now, began = user.spent, perf_counter()
        try:
            user.step(began + QUANTUM)
        finally:
            self._round = ended = perf_counter()
            self._due = ended + ended - began
            user.spent += ended - began
            if user.idle and self._users.get(uid) is user:
                del self._users[uid]
