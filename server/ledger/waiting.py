"""Requests that are not answered at once: how they begin to wait, and how they stop.

An attach waits for a publication; a create waits for its turn, for room, and for its memory; others wait for
events. All of them stop in :func:`leave`, whatever the cause: served, refused, out of time, cancelled, or their
session is lost. A request that waits is answered exactly once, unless its session is lost.
"""

from __future__ import annotations

from cubroker.protocol.errors import CubrokerError, Invalid, OverQuota
from cubroker.protocol.messages import Failed, Reply
from cubroker.server.ledger import shortages
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Session
from cubroker.server.ledger.events import DropTimer, Respond, SetTimer
from cubroker.server.ledger.leases import end
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.room import spare, stir
from cubroker.server.ledger.states import Cause, State
from cubroker.server.ledger.waiters import Listener, Phase, Reader, Waiter, Writer


def admit(books: Books, session: Session, request: int) -> None:
    """Raise unless ``session`` and its user may have one more unfinished request, ``request``."""
    if request in session.unfinished:
        raise Invalid(f"request {request} is unfinished; a new request needs a new id")
    if len(session.unfinished) >= books.limits.unfinished:
        raise OverQuota(
            f"this session has {books.limits.unfinished} unfinished requests, the most that one may;"
            f" cancel some of them"
        )
    user = session.user
    if exceeds(user.unfinished, 1, user.quota.requests):
        raise OverQuota(shortages.too_many_requests(user))


def begin(books: Books, waiter: Waiter) -> None:
    """Put an admitted request on the books."""
    user = waiter.session.user
    waiter.since = books.clock.now
    waiter.session.unfinished[waiter.request] = waiter
    user.unfinished += 1
    if isinstance(waiter, Reader):
        waiter.pool.readers[waiter] = None
    elif isinstance(waiter, Listener):
        waiter.line[waiter] = waiter.lease.listeners[waiter] = None
    else:
        waiter.pool.line[waiter] = None
        user.layouts += len(waiter.body.layout)
        user.pieces += waiter.descriptors
        books.stored += waiter.stored
    waiter.pool.story.append(f"request {waiter.request} of {waiter.session.label} began to wait")


def limit(books: Books, waiter: Waiter) -> None:
    """Have a request that waits end when its time is up."""
    waiter.timer = next(books.timer_ids)
    books.timers[waiter.timer] = waiter
    books.effects.append(SetTimer(waiter.timer, waiter.body.wait))


def unlimit(books: Books, waiter: Waiter) -> None:
    """Take back what :func:`limit` did, if it did."""
    if waiter.timer:
        del books.timers[waiter.timer]
        books.effects.append(DropTimer(waiter.timer))
        waiter.timer = 0


def leave(books: Books, waiter: Waiter) -> None:
    """Take a request off the books, with all that it was given so far."""
    del waiter.session.unfinished[waiter.request]
    waiter.session.user.unfinished -= 1
    unlimit(books, waiter)
    if isinstance(waiter, Reader):
        del waiter.pool.readers[waiter]
    elif isinstance(waiter, Listener):
        del waiter.line[waiter], waiter.lease.listeners[waiter]
    else:
        _step_out(books, waiter)
    if waiter.pool.idle:
        books.stirred_pools[waiter.pool] = None
    waiter.pool.story.append(f"request {waiter.request} of {waiter.session.label} stopped waiting")


def _step_out(books: Books, writer: Writer) -> None:
    user = writer.session.user
    if writer.phase is not Phase.MEMORY:
        user.layouts -= len(writer.body.layout)
        user.pieces -= writer.descriptors
        books.stored -= writer.stored
    if writer.phase is Phase.TURN:
        del writer.pool.line[writer]
        come_back(books, writer)
        return
    writer.pool.writer = None
    books.stirred_pools[writer.pool] = None
    if writer.phase is Phase.ROOM:
        leave_lines(books, writer)
        spare(books, user, writer.total)
        return
    draft = writer.pool.draft
    assert draft is not None
    if draft.state is State.ALLOCATING:
        end(books, draft, Cause.DROPPED)


def step_aside(writer: Writer) -> None:
    """Put a create whose turn it could be into its user's line, so that others may have the turn meanwhile."""
    if not writer.aside:
        user, writer.aside = writer.session.user, True
        user.line.insert(user.place(writer), writer)


def come_back(books: Books, writer: Writer) -> None:
    """Take a create out of its user's line, if it is in it; whoever is next there may have room now."""
    if writer.aside:
        user, writer.aside = writer.session.user, False
        del user.line[user.place(writer)]
        stir(books, user)


def leave_lines(books: Books, writer: Writer) -> None:
    """Take a create out of the lines for room; whoever is next in them may have room now."""
    for account in writer.accounts:
        del account.line[account.place(writer)]
        books.stirred_accounts[account] = None


def answer(books: Books, waiter: Waiter, body: Reply) -> None:
    """Answer a request that has left."""
    books.effects.append(Respond(waiter.session.id, waiter.request, body))


def refuse(books: Books, waiter: Waiter, error: CubrokerError) -> None:
    """End a request that waits with a refusal."""
    leave(books, waiter)
    answer(books, waiter, Failed(error.code, error.message))
