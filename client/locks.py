"""Locks of names, for work that only one process at a time may do: see :meth:`cubroker.client.broker.Broker.lock`.

A :class:`LockHandle` is one lock in this process, from its request to its end, through any interrupt of its caller. As
with leases, no frame of the caller owns a lock: it is given back with the last reference to its :class:`LockRef`.
"""

from __future__ import annotations

from cubroker.client.fork_guard import Closeable, NotPicklable
from cubroker.client.session import ClientSession, Resource
from cubroker.client.transport.requests import Pending, Steps, blocking
from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.protocol.messages import Lock, Locked, Reply, Unlock


class LockRef:
    """What stands for a lock in this process; the lock is given back with the last reference to this object."""

    __slots__ = ("__weakref__",)


class LockHandle(Resource[LockRef]):
    """The lock of a name: requested, held, or being given back."""

    request = "Lock"

    def __init__(self, session: ClientSession, name: str, wait: float) -> None:
        super().__init__(session, f"the lock of {name!r}")
        self._body = Lock(name, wait)
        self._pending = Pending(self._answered)
        self._posted = False
        self._number = 0

    # -- on the cleanup thread ---------------------------------------------------------------------

    def begin(self) -> None:
        """See :meth:`Resource.begin`."""
        if self.abandoned:
            if self._posted:
                self._session.requests.cancel(self._pending)
            else:
                self._forget()
        elif not self._posted:
            self._posted = True
            self._session.requests.post(self._body, self._pending)

    def _release(self) -> None:
        self._session.requests.send(Unlock(self._number), lambda _: self._forget())

    # -- on the connection's thread ----------------------------------------------------------------

    def _answered(self, reply: Reply | CubrokerError) -> None:
        if isinstance(reply, Locked):
            self._number = reply.lock
            self._guarded(LockRef, self._release)
        else:
            strange = Unavailable(f"the broker answered the request Lock with {type(reply).__name__}")
            self.fail(reply if isinstance(reply, CubrokerError) else strange)
            self._forget()

    def _forget(self) -> None:
        self._session.forget(self)
        self._ended.set(None)


class NameLock(NotPicklable, Closeable):
    """The lock of a pool's name, which this process holds until :meth:`close`, or the end of ``with``.

    Attributes:
        name: the name.
    """

    def __init__(self, handle: LockHandle, ref: LockRef, session: ClientSession, name: str) -> None:
        self._ref: LockRef | None = ref
        #: The Broker, which this reference keeps open while the lock is held; see :class:`Pool`.
        self.opener: object = None
        self.name = name
        self._handle = handle
        self._session = session
        self._owner = session.owner

    def __repr__(self) -> str:
        return f"<NameLock of {self.name!r}, {'given back' if self.closed else self.lost or 'held'}>"

    @property
    def closed(self) -> bool:
        """Whether the lock was given back, here or with the Broker."""
        return self._ref is None

    @property
    def lost(self) -> str:
        """Why the session is over, and with it the lock; empty while the broker knows of it. See ``Broker.lost``."""
        return self._session.lost

    @blocking
    def close(self) -> Steps[None]:
        """Give the lock back; the next process in line then gets it.

        Raises:
            TimedOut: the lock is being given back, but the broker has not confirmed that in time.
        """
        if self.let_go():
            yield from self._handle.confirm()

    def let_go(self) -> bool:
        """Begin to give the lock back, without waiting; returns whether that is under way."""
        self._owner.check()
        self._ref = self.opener = None
        return self._handle.ending

    def confirming(self) -> Steps[None]:
        """Wait until the broker has confirmed that a lock that was let go is given back."""
        return self._handle.confirm()


def obtain(session: ClientSession, name: str, wait: float) -> Steps[NameLock]:
    """Take the lock of a name; see :meth:`cubroker.client.broker.Broker.lock`."""
    handle = LockHandle(session, name, wait)
    return NameLock(handle, (yield from handle.obtain(wait)), session, name)
