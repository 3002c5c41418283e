"""Lending nothing new: while somebody drains the broker by hand, and once it was told to end.

What is held stays, and giving it back, retiring, events and listings go on. Whoever asks for a lease is refused, and so
is whoever waits for one. By hand that goes for everything, until it is taken back, by the next broker as well if
there is a store. A broker that ends refuses what would go with it: everything, or, where a store keeps durable memory
for the next one and does not end itself, what is not durable. Once nothing like that is held any more, it has
:class:`Drained`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from cubroker.protocol.errors import Denied, Unavailable
from cubroker.protocol.messages import Done, Drain, Draining
from cubroker.server.ledger import waiting, wording
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Session, Version
from cubroker.server.ledger.events import Drained, Notify
from cubroker.server.ledger.permissions import is_privileged
from cubroker.server.ledger.states import Impossible, State
from cubroker.server.ledger.waiters import Listener, Writer

BY_HAND = "whoever runs it wants everything to be given back"
ENDING = "it was told to end"

MOST = 20
"""Leases that are named where all of them are told."""


def check(books: Books, *, durable: bool) -> None:
    """Raise ``Unavailable`` if there are no new leases; ``durable`` says whether it is one on durable memory."""
    if _refuses(books, durable=durable):
        raise _refusal(books)


def reason(books: Books) -> str:
    """Return why nobody gets anything new; nothing if that is not so, or not for all memory."""
    return (ENDING if books.awaited is not None else BY_HAND) if _refuses(books, durable=True) else ""


def drain(books: Books, session: Session, body: Drain) -> Done:
    """Begin to drain by hand, or take that back.

    Raises:
        Denied: the session's user does not administer the broker.
        Unavailable: the broker ends, which nobody can take back.
    """
    if not is_privileged(books, session):
        raise Denied(wording.not_administrator(books, session))
    if books.awaited is not None and not body.on:
        raise Unavailable(f"the broker lends nothing new, since {ENDING}; wait until it was started again")
    before, books.drained = reason(books), body.on
    _refuse_waiters(books)
    if (now := reason(books)) != before:
        _tell(books, books.sessions.values(), now)
    return Done()


def end(books: Books, *, with_store: bool) -> None:
    """Wait for all leases on what would go with the broker, and have nobody get another."""
    if books.awaited is not None:
        raise Impossible("a broker that ends is to end")
    books.outlived = books.outlived and not with_store
    books.awaited = {lease.id: lease for lease in books.leases.values() if goes(books, lease.version)}
    _refuse_waiters(books)
    held = books.awaited.values()
    everybody = books.sessions.values()
    _tell(books, dict.fromkeys(lease.session for lease in held) if books.outlived else everybody, ENDING)
    if not books.awaited:
        books.effects.append(Drained())


def takes_along(books: Books, *, with_store: bool) -> bool:
    """Say whether anything is held that would go with the broker, and ``with_store`` that does."""
    return any(
        goes(books, lease.version) or (with_store and lease.version.state is not State.LOST)
        for lease in books.leases.values()
    )


def in_words(books: Books) -> str:
    """Return which versions that go with the broker are held, and by whom, for people; nothing if none are."""
    leases = [lease for lease in books.leases.values() if goes(books, lease.version)]
    pairs = Counter(f"{lease.version.label} by {lease.session.label}" for lease in leases)
    named = [pair if times == 1 else f"{pair} {times} times" for pair, times in islice(pairs.items(), MOST)]
    if (more := len(pairs) - MOST) > 0:
        named.append(f"and {more} more")
    return ", ".join(named)


def last_words(session: Session) -> str:
    """Return what a session should know of what it still holds as the broker ends; nothing if it holds nothing."""
    versions = dict.fromkeys(lease.version for lease in session.leases.values())
    if not versions:
        return ""
    held = ", ".join(version.label for version in islice(versions, MOST))
    doomed = [version.label for version in versions if version.share == "ipc"][:MOST]
    advice = f"do not use {', '.join(doomed)} any more, whose memory ends with it" if doomed else "unmap it when done"
    return f"this process still holds {held}: {advice}"


def goes(books: Books, version: Version) -> bool:
    """Whether the memory of a version goes with the broker; that of a lost one has gone."""
    return version.state is not State.LOST and not (version.durable and books.outlived)


def _refuses(books: Books, *, durable: bool) -> bool:
    return books.drained or (books.awaited is not None and not (durable and books.outlived))


def _refusal(books: Books) -> Unavailable:
    why, hint = (BY_HAND, "go on without, or ask again later") if books.drained else (ENDING, "ask the next one")
    return Unavailable(f"the broker lends nothing new: {why}; {hint}")


def _refuse_waiters(books: Books) -> None:
    for session in books.sessions.values():
        for waiter in tuple(session.unfinished.values()):
            durable = waiter.durable if isinstance(waiter, Writer) else True
            if not isinstance(waiter, Listener) and _refuses(books, durable=durable):
                waiting.refuse(books, waiter, _refusal(books))


def _tell(books: Books, sessions: Iterable[Session], why: str) -> None:
    books.effects += [Notify(session.id, Draining(why)) for session in sessions if session.connected]
