"""How sessions begin and end: with their process, or, once their connection is lost, with their last lease."""

from __future__ import annotations

from cubroker.server.ledger import mapped, publishing, signals, waiting, wording
from cubroker.server.ledger.books import Books, Kind
from cubroker.server.ledger.chronicle import Story
from cubroker.server.ledger.entries import SESSION, Session
from cubroker.server.ledger.events import Forget, Gone, Joined, Lost
from cubroker.server.ledger.states import Impossible


def joined(books: Books, event: Joined) -> None:
    """Begin a session."""
    known = books.sessions.get(event.session)
    if known is not None:
        raise Impossible(f"session {event.session} joined twice; what happened before:", known.story)
    user = books.user(event.uid)
    story = Story(books.clock)
    story.append(f"process {event.pid} of user {event.uid} joined")
    session = Session(event.session, event.pid, user, event.gid, event.groups, story=story, verified=event.verified)
    books.sessions[session.id] = user.sessions[session.id] = session
    books.last_session = max(books.last_session, session.id)
    books.stored += SESSION
    books.mark(Kind.SESSION, session.id)


def lost(books: Books, event: Lost) -> None:
    """Note that a session asks for nothing new, and is told nothing; without leases it ends."""
    session = books.sessions.get(event.session)
    if session is None:
        return
    session.connected = False
    books.mark(Kind.SESSION, session.id)
    session.story.append("the connection ended")
    _stop(books, session)
    if not session.leases:
        end(books, session)


def gone(books: Books, event: Gone) -> None:
    """End a session whose process has ended."""
    session = books.sessions.get(event.session)
    if session is not None:
        session.story.append("its process has ended")
        mapped.gone(books, session)
        end(books, session)


def end(books: Books, session: Session) -> None:
    """End a session, and all that it has."""
    _stop(books, session)
    for lease in tuple(session.leases.values()):
        signals.give_back(books, lease, wording.ENDED)
    session.story.append("it ended")
    books.leave(session)
    books.stored -= SESSION
    books.mark(Kind.SESSION, session.id)
    books.effects.append(Forget(session.id))


def _stop(books: Books, session: Session) -> None:
    """End all that a session waits for and watches."""
    for waiter in tuple(session.unfinished.values()):
        waiting.leave(books, waiter)
    for name in tuple(session.watches):
        publishing.unwatch(books, session, name)
