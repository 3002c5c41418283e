"""Requests on their way to the broker, and the futures that bring their answers. Nothing here touches a socket.

What callers pass to the public functions is checked here, too, and returned as requests carry it.

Every call that waits is written once, as *steps*: a generator that yields each future that it waits for. :func:`run`
runs the steps and blocks its thread; :func:`run_in_loop` runs them in an event loop, which continues while they wait.

Any thread posts requests, by one call into C; the connection's thread numbers, encodes and settles them. So no lock is
held while a request is made, and a signal handler that interrupts a request may make another.

A request is sent again under its number when the gateway was replaced, and once a second while it is unanswered, or at
growing intervals if it is large: the broker executes it once, and answers it each time.
"""

from __future__ import annotations

import logging
import os
import pwd
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from inspect import signature
from itertools import islice
from math import inf
from operator import index
from threading import Lock
from time import monotonic
from typing import Any, Generic, ParamSpec, SupportsIndex, TypeAlias, TypeVar, cast, get_args

from msgspec import Struct

from cubroker.client.fork_guard import NotPicklable, OwnerProcess
from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Invalid, TimedOut, Unavailable, from_code
from cubroker.protocol.fields import MAX_RECEIVED, MAX_WAIT
from cubroker.protocol.layout import MAX_EXTENT
from cubroker.protocol.messages import AUTO, SHARES, Answer, Cancel, Envelope, Failed, Notice, Reply, Request
from cubroker.protocol.wire import Bearer

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R", bound=Reply)
T = TypeVar("T")

RESEND = 1.0
"""Seconds after which an unanswered request is sent again."""

LARGE = 64 << 10
"""Bytes of a request past which these seconds double with each copy: what a stopped gateway has not read is kept."""

PART = 1.0
"""Seconds: the longest part of a wait with a limit."""

SHORT = 0.01
"""Seconds: a wait as short as this is not divided into parts."""

UNWANTED = Unavailable("its caller has stopped waiting")

Settle = Callable[[Reply | CubrokerError], None]
"""Receives the answer of a request, or the error instead. Runs on the connection's thread: it must be quick."""


class Future(Generic[T]):
    """A value or an error to come. Any thread may wait, and any may deliver; the first delivery counts.

    It is made of bare locks, without a condition variable, since every request waits on one.
    """

    __slots__ = ("_abandoned", "_calls", "_done", "_error", "_gate", "_taken", "_value")

    def __init__(self) -> None:
        self._gate = Lock()  # held until the delivery
        self._gate.acquire()
        self._taken = Lock()  # held from the delivery on
        self._done = False  # authoritative: a waiter interrupted between acquire and release leaves the gate locked
        self._value: T | None = None
        self._error: CubrokerError | None = None
        self._abandoned = False
        self._calls: list[Callable[[], None]] = []  # for the delivery

    def done(self) -> bool:
        """Whether :meth:`result` would return or raise without waiting."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None: without limit); returns whether there was a delivery.

        The wait is divided into parts: time in which this process is stopped counts as one part at most.
        """
        left = inf if timeout is None else timeout
        part = min(PART, max(left / 10, SHORT), max(left, 0.0))
        while not self._done:
            if self._gate.acquire(timeout=part):
                self._gate.release()
            else:
                left -= part
                if left <= 0:
                    return self._done
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait like :meth:`wait`; return the value or raise the error that came, or ``TimedOut``."""
        if not self.wait(timeout):
            raise TimedOut(f"no result within {timeout:g} s")
        if self._error is not None:
            raise self._error.anew()
        return cast(T, self._value)

    def set(self, value: T) -> None:
        """Deliver the value, which an abandoned future does not keep."""
        self.take([value])

    def take(self, box: list[T]) -> None:
        """Deliver the value in a box and empty the box, so that the sender keeps no reference to the value."""
        if self._taken.acquire(blocking=False):
            self._value = box.pop()
            if self._abandoned:
                self._value = None
            self._finish()

    def fail(self, error: CubrokerError) -> None:
        """Deliver an error."""
        if self._taken.acquire(blocking=False):
            self._error = error
            self._finish()

    def settle(self, outcome: T | CubrokerError) -> None:
        """Deliver a value or an error."""
        if isinstance(outcome, CubrokerError):
            self.fail(outcome)
        else:
            self.set(outcome)

    def abandon(self) -> None:
        """Drop the value, now or when it comes. A traceback may keep this object alive for long."""
        # `take` stores the value and then reads `_abandoned`. One of the two drops the value, whatever their order.
        self._abandoned = True
        self._value = None

    def when_done(self, call: Callable[[], None]) -> None:
        """Make a quick call after the delivery: on the thread that delivers, or on this one, or on both."""
        self._calls.append(call)
        if self._done:  # read last: either the delivery sees the call, or this line sees the delivery
            call()

    def forget(self, call: Callable[[], None]) -> None:
        """Undo :meth:`when_done`, unless the call was made already."""
        self._calls.remove(call)

    def _finish(self) -> None:
        self._done = True
        self._gate.release()
        for call in self._calls.copy():
            call()


Steps: TypeAlias = Generator[tuple[Future[Any], float | None], bool, T]
"""A call that waits, as a generator, which returns what the call does.

It yields each future that it waits for, with the seconds to wait (None: without limit), and is sent what
:meth:`Future.wait` returns. Closing the generator abandons the call, which gives back what it was about to receive.
"""


def run(steps: Steps[T]) -> T:
    """Run steps, and block this thread while they wait."""
    try:
        wanted = next(steps)
        while True:
            future, limit = wanted
            wanted = steps.send(future.wait(limit))
    except StopIteration as ended:
        return cast(T, ended.value)
    finally:
        steps.close()  # for an interrupt that came while they waited, outside of their own code


def beside(steps: Steps[T], call: Callable[[], object]) -> Steps[T]:
    """Return steps that make ``call`` before they wait for the first time; if it raises, they are abandoned."""
    try:
        wanted = next(steps)
        call()
        while True:
            wanted = steps.send((yield wanted))
    except StopIteration as ended:
        return cast(T, ended.value)
    finally:
        steps.close()


async def run_in_loop(steps: Steps[T]) -> T:
    """Run steps, and let the event loop of this task continue while they wait."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(await _arrives(*wanted))
    except StopIteration as ended:
        return cast(T, ended.value)
    finally:
        steps.close()  # for a task that was cancelled while they waited


async def _arrives(future: Future[Any], timeout: float | None) -> bool:
    """Wait as :meth:`Future.wait` does, in an event loop."""
    import asyncio  # not above: it takes as long to import as all of this package, and a caller in a loop has it

    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def take() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def tell() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(take)

    left = inf if timeout is None else timeout
    part = None if left == inf else min(PART, max(left / 10, SHORT), left)
    future.when_done(tell)
    try:
        while not future.done() and left > 0:
            await asyncio.wait((arrived,), timeout=part)
            left -= part or 0
    finally:
        future.forget(tell)
    return future.done()


def blocking(steps: Callable[P, Steps[T]]) -> Callable[P, T]:
    """Turn a method that returns steps into one that blocks; the former remains as ``__wrapped__``."""

    @wraps(steps)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(steps(*args, **kwargs))

    # Without this, help() shows the steps as what the method returns.
    returned = str(steps.__annotations__["return"]).removeprefix("Steps[").removesuffix("]")
    call.__annotations__ = {**steps.__annotations__, "return": returned}
    call.__signature__ = signature(steps).replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


class Pending:
    """A request until it is settled."""

    __slots__ = ("body", "due", "number", "pause", "settle", "settled")

    body: Request

    def __init__(self, settle: Settle) -> None:
        #: Its number, once it is on its way; 0 before.
        self.number = 0
        #: When it is sent again, by the monotonic clock.
        self.due = 0.0
        #: Seconds from the last copy to the next.
        self.pause = RESEND
        self.settled = False
        self.settle = settle

    def end(self, outcome: Reply | CubrokerError) -> None:
        """Settle the request; only the first call has an effect."""
        if not self.settled:
            self.settled = True
            self.settle(outcome)


class Requests(NotPicklable):
    """All requests of one session.

    Args:
        authentication: authenticates the frames of this session.
        owner: the process that opened the session; other processes are refused.
        wake: wakes the connection's thread, which then calls :meth:`take`.
    """

    def __init__(self, authentication: Bearer, owner: OwnerProcess, wake: Callable[[], None]) -> None:
        #: Encoded requests for the connection's thread to send, oldest first.
        self.outbox: deque[bytes] = deque()
        self._authentication = authentication
        self._forged = 0
        self._owner = owner
        self._wake = wake
        self._posted: deque[Pending | Callable[[], None]] = deque()
        self._next = 1
        self._pending: dict[int, Pending] = {}
        self._received: deque[int] = deque()  # answered while an older request waits; the broker was not told yet
        self._closed: CubrokerError | None = None
        self._checked = 0.0

    # -- on any thread -----------------------------------------------------------------------------

    def submit(self, body: Request) -> Future[Reply]:
        """Send a request without waiting. The future's result is the reply; :class:`Failed` is raised as its error.

        A caller that asks for leases this way opens and closes them itself; descriptors that come for them are closed.
        """
        future: Future[Reply] = Future()
        self.post(body, Pending(future.settle))
        return future

    def send(self, body: Request, settle: Settle) -> None:
        """Send a request; ``settle`` is called once, with its reply or an error."""
        self.post(body, Pending(settle))

    def post(self, body: Request, pending: Pending) -> None:
        """Send a request whose ``pending`` the caller keeps, so that it can :meth:`cancel` the request."""
        self._owner.check()
        pending.body = body
        self._put(pending)

    def cancel(self, pending: Pending) -> None:
        """Tell the broker, unless it has answered, that no caller waits; settle a request that was not sent yet."""
        self._put(partial(self._cancel, pending))

    def call(self, task: Callable[[], None]) -> None:
        """Call ``task`` on the connection's thread, after what was posted before; if that has ended, on this thread."""
        self._owner.check()
        self._put(task)

    def flush(self) -> None:
        """Wait until what was posted before is encoded.

        A caller that computes next would hold the interpreter, and the connection's thread could not encode.
        """
        taken: Future[None] = Future()
        self.call(partial(taken.set, None))
        taken.wait()

    def waiting(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._pending or self._posted)

    def _put(self, posted: Pending | Callable[[], None]) -> None:
        self._posted.append(posted)
        self._wake()
        if self._closed:  # read last: either `close` sees what was posted, or this line sees `close`
            try:
                self._posted.remove(posted)  # only this one: each of the others may post again when it is settled
            except ValueError:  # `close` was faster
                return
            self._reject(posted, self._closed)

    def _reject(self, posted: Pending | Callable[[], None], reason: CubrokerError) -> None:
        if isinstance(posted, Pending):
            posted.end(reason.anew())
        else:
            posted()

    # -- on the connection's thread ----------------------------------------------------------------

    def take(self) -> None:
        """Put the posted requests into the outbox, numbered in order, and make the posted calls."""
        while self._posted:
            posted = self._posted.popleft()
            if not isinstance(posted, Pending):
                posted()
            elif not posted.settled:
                self._begin(posted)

    def read(self, frame: bytes) -> Answer | None:
        """Return the answer in a frame; None for a frame that is not the broker's: its request will be sent again."""
        answer = self._authentication.read(frame)
        if answer is None:
            self._forged += 1
            if self._forged == 1:
                log.warning(
                    "the gateway alters or forges answers: such answers are dropped, and their requests sent again; ask"
                    " the broker's operator to end the gateway, and the broker starts another"
                )
        return answer

    def answer(self, answer: Answer) -> Request | None:
        """Settle the request of an answer, and return the request; None if it was answered before."""
        body = answer.body
        pending = self._pending.pop(answer.id, None)
        if pending is None:
            return None
        if next(iter(self._pending), answer.id) < answer.id:
            self._received.append(answer.id)
        pending.end(from_code(body.code, body.message) if type(body) is Failed else body)
        return pending.body

    def resend_all(self) -> None:
        """Put every unanswered request into the outbox, oldest first, and nothing else: the gateway is a new one."""
        self.outbox.clear()
        now = monotonic()
        for number, pending in self._pending.items():
            pending.pause = RESEND
            self._put_out(pending, self._pack(number, pending.body), now)

    def resend_overdue(self) -> None:
        """Put those requests into the outbox that are due to be sent again."""
        now = monotonic()
        if now >= self._checked + RESEND / 2 and not self.outbox:
            self._checked = now
            for number, pending in self._pending.items():
                if pending.due <= now:
                    self._put_out(pending, self._pack(number, pending.body), now)

    def close(self, reason: CubrokerError, *, quietly: bool = False) -> None:
        """Settle every request with ``reason``, and every later one too; ``quietly``: the later ones alone."""
        self._closed = reason
        self.outbox.clear()
        if quietly:
            self._posted.clear()
            return
        while self._posted:
            try:
                posted = self._posted.popleft()
            except IndexError:  # another thread removed its own, in `_put`
                break
            self._reject(posted, reason)
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.end(reason.anew())

    def _begin(self, pending: Pending) -> None:
        try:
            data = self._pack(self._next, pending.body)
        except CubrokerError as error:
            return pending.end(error)
        except (TypeError, ValueError) as error:
            return pending.end(Invalid(f"a request that cannot be sent: {error}"))
        pending.number = self._next
        self._next += 1
        self._pending[pending.number] = pending
        return self._put_out(pending, data, monotonic())

    def _cancel(self, pending: Pending) -> None:
        if not pending.number:
            pending.end(UNWANTED)
        elif pending.number in self._pending:
            request = Pending(lambda _: None)
            request.body = Cancel(pending.number)
            self._begin(request)

    def _put_out(self, pending: Pending, data: bytes, now: float) -> None:
        self.outbox.append(data)
        pending.due = now + pending.pause
        if len(data) > LARGE:
            pending.pause *= 2

    def _pack(self, number: int, body: Request) -> bytes:
        """Encode a request, with the numbers of received answers: the broker drops these, and may wait for the room."""
        oldest, received = next(iter(self._pending), number), tuple(islice(self._received, MAX_RECEIVED))
        envelope = Envelope(self._authentication.secret, number, oldest, body, received)
        data = self._authentication.request(envelope)
        for _ in received:
            self._received.popleft()
        return data


# -- what callers pass ---------------------------------------------------------------------------------
#
# Each function returns an argument as requests carry it, or raises ``Invalid`` with a text that says what was passed
# and what can be passed instead. Devices and plans are checked where they are looked up (`client/devices.py`), arrays
# where they are read (`client/arrays.py`).

MAX_UID = (1 << 32) - 1
"""The largest number that a user can have."""

Owner = int | str
"""A user, by number or by name."""

Owners = Owner | Sequence[Owner] | None
"""Users; None for those of the environment."""

VARIABLE = "CUBROKER_OWNER"
"""The environment variable that has the default, users separated by commas."""


def seconds(limit: float, what: str = "wait", *, zero: bool = True) -> float:
    """Return a time in seconds, which only with ``zero`` may be 0."""
    try:
        if not isinstance(limit, bool) and 0 <= limit <= MAX_WAIT and (zero or limit != 0):
            return float(limit)
    except (TypeError, ValueError, ArithmeticError):  # None, which other libraries take for no limit, or an array
        pass
    raise Invalid(f"a {what} of {limit!r:.60} seconds; it can be {'0' if zero else 'more than 0, up'} to {MAX_WAIT:g}")


def time_limit(timeout: float | None) -> float:
    """Return for how many seconds to wait: infinitely many for None."""
    return inf if timeout is None else seconds(timeout, "timeout")


def whole(value: object, least: int = 0, most: int = MAX_EXTENT) -> int | None:
    """Return an integer of any type, numpy's for example; None if it is out of range, a bool, or anything else."""
    try:
        number = -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if least <= number <= most else None


def version_number(version: SupportsIndex | None) -> int:
    """Return the number of a version, 0 for the current one."""
    if version is None:
        return 0
    number = whole(version, 1)
    if number is None:
        raise Invalid(
            f"version {version!r:.60} is no whole number from 1 to {MAX_EXTENT}; leave it out for the current one"
        )
    return number


def session_number(session: int) -> int:
    """Return the number of a session."""
    number = whole(session, 1)
    if number is None:
        raise Invalid(f"{session!r:.60} is no session: pass its number, as Broker.clients() lists it, from 1 on")
    return number


def flag(value: bool, what: str) -> bool:
    """Return a flag: what equals True or False, as 1 and numpy's do."""
    of_numpy = type(value).__module__ == "numpy" and type(value).__name__.startswith("bool")
    if (isinstance(value, int) or of_numpy) and value in (False, True):
        return bool(value)
    raise Invalid(f"{what}={value!r:.60} is neither True nor False; pass one of these, or leave it out")


def share_kind(share: str) -> str:
    """Return a share kind, or :data:`~cubroker.protocol.messages.AUTO`."""
    if isinstance(share, str) and share in (AUTO, *SHARES):
        return str.__str__(share)
    raise Invalid(f"unknown share kind {share!r:.60}; use {' or '.join((AUTO, *SHARES))}")


def file_mode(mode: int | None) -> int | None:
    """Return permissions like a file's; None for those that the pool has."""
    if mode is None:
        return None
    number = whole(mode, 0, 0o777)
    if number is None:
        what = f"0o{mode:o}" if type(mode) is int else "no whole number"
        raise Invalid(f"a mode of {mode!r:.60}, which is {what}; write it in octal, as in 0o640, from 0 to 0o777")
    return number


def uids(owner: Owners) -> tuple[int, ...]:
    """Return the numbers of users; for None, of the users in the environment. Empty stands for all users."""
    if owner is None:
        owner = [part.strip() for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]
    users: Iterable[object] = (owner,)
    if not isinstance(owner, str | bytes | Mapping):
        with suppress(TypeError):  # it is a number, perhaps one that is an array without dimensions
            users = iter(owner)  # type: ignore[arg-type]
    return tuple(map(_uid, users))


def _uid(owner: object) -> int:
    if isinstance(owner, str):
        try:
            owner = int(owner) if owner.isascii() and owner.isdecimal() else pwd.getpwnam(owner).pw_uid
        except (KeyError, ValueError):  # a name with a zero byte is a ValueError
            raise Invalid(f"this system has no user {owner!r}; write a name that it has, or a number") from None
    number = whole(owner, 0, MAX_UID)
    if number is None:
        raise Invalid(f"{owner!r:.60} is no user: pass a name, a number from 0 to {MAX_UID}, or a list of these")
    return number


# -- what the broker sends ------------------------------------------------------------------------------


def expect(reply: Reply, kind: type[R]) -> R:
    """Return ``reply``, which the protocol says is a ``kind``."""
    if not isinstance(reply, kind):
        raise failure(reply, kind)
    return reply


def failure(reply: Reply | CubrokerError, kind: type[object]) -> CubrokerError:
    """Return the error that came in place of a ``kind``, or one that says which other reply came."""
    if isinstance(reply, CubrokerError):
        return reply
    return Unavailable(f"the broker answered with {type(reply).__name__} instead of {kind.__name__}")


class _Kind(Struct, array_like=True):
    """How a notice of any kind begins."""

    name: str


wire.prepare(_Kind)

KNOWN = frozenset(kind.__name__ for kind in get_args(Notice))


def read_notice(data: bytes) -> Notice | None:
    """Return a notice of the session socket; None, and a line in the log, for a kind that a newer broker has added."""
    try:
        notice: Notice = wire.unpack(data, Notice)
    except Invalid:
        name = wire.unpack(data, _Kind).name
        if name in KNOWN:
            raise
        log.warning("the broker says %.80r, which this version of cubroker does not know; it is skipped", name)
        return None
    return notice
