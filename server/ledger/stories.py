"""The last events of pools and sessions, told to whoever may hear them; also of those that have ended."""

from __future__ import annotations

from cubroker.protocol import names
from cubroker.protocol.errors import Denied, NotFound
from cubroker.protocol.infos import Line
from cubroker.protocol.messages import Story as Told
from cubroker.protocol.messages import Tell
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.chronicle import Story
from cubroker.server.ledger.entries import Pool, Session
from cubroker.server.ledger.permissions import may_hear, may_see


def find(books: Books, subject: str | int) -> Story | None:
    """Return the story of a pool, by name, or of a session, by id; None if nothing is known of it."""
    record: Pool | Session | None
    if isinstance(subject, str):
        record = books.pools.get(subject) or books.past_pools.get(subject)
    else:
        record = books.sessions.get(subject) or books.past_sessions.get(subject)
    return None if record is None else record.story


def tell(books: Books, session: Session, body: Tell) -> Told:
    """Tell the story of a pool, or of a session.

    Raises:
        Denied: ``session`` may not read the pool.
        NotFound: nothing is known of it, or the other session is another user's.
    """
    if body.pool is None:
        _check_session(books, session, body.session)
    else:
        _check_pool(books, session, body.pool)
    story = find(books, body.session if body.pool is None else body.pool)
    assert story is not None
    return Told(tuple(Line(time, text) for time, text in story.lines))


def _check_pool(books: Books, session: Session, name: str) -> None:
    names.check(name)
    pool = books.pools.get(name) or books.past_pools.get(name)
    heard = pool is not None and may_hear(books, session, pool)
    if pool is not None and pool.owner is not None and not heard:
        raise Denied(f"user {session.uid} may not hear of {name}; ask its owner for a mode that lets you")
    if not heard:
        raise NotFound(f"nothing is known of a pool {name}; the list of pools has those that there are")


def _check_session(books: Books, session: Session, number: int) -> None:
    other = books.sessions.get(number) or books.past_sessions.get(number)
    if other is None or not may_see(books, session, other):
        raise NotFound(
            f"nothing is known of a session {number} of user {session.uid}; the list of clients has those that there"
            f" are, and administrators may hear of all"
        )
