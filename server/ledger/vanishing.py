"""What a restored ledger is told before it goes on: which memory went with the broker before it; and how it goes on.

A version is lost with the first piece of its memory. Nobody can attach to it any more, its name is free for the
next one, and those who hold it are told; what they have mapped is theirs, and counts until they give it back.
"""

from __future__ import annotations

from cubroker.protocol.errors import Retired
from cubroker.protocol.messages import PoolLost
from cubroker.server.ledger import publishing, teams, waiting, wording
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Loss, Pool, Version
from cubroker.server.ledger.events import Notify, Vanished
from cubroker.server.ledger.leases import end_if_empty
from cubroker.server.ledger.permissions import may_hear
from cubroker.server.ledger.room import under_way
from cubroker.server.ledger.states import Cause, Impossible, State

AGAIN = "the broker was started again"


def vanished(books: Books, event: Vanished) -> None:
    """Note that memory cannot be reached any more: its version is lost."""
    version = under_way(books, event.ticket).version
    if version.state not in (State.LOST, State.ENDED):
        books.move(version, Cause.VANISHED)
        version.why = event.why
        version.pool.remember(Loss(version.number, event.why))
        if books.resumed:
            _tell(books, version)
        _out_of_service(books, version)
        end_if_empty(books, version)


def _tell(books: Books, version: Version) -> None:
    notice = PoolLost(version.pool.name, version.number, version.why)
    sessions = dict.fromkeys(lease.session for lease in version.holders.values())
    books.effects += [Notify(session.id, notice) for session in sessions if session.connected]


def _out_of_service(books: Books, version: Version) -> None:
    pool = version.pool
    if pool.current is version:
        pool.current = None
        publishing.announce(books, pool)
    elif pool.draft is version:
        pool.draft, pool.last = None, version.number  # which somebody knows already, so nobody else gets it
        _refuse_readers(books, pool)
        books.stirred_pools[pool] = None


def _refuse_readers(books: Books, pool: Pool) -> None:
    """Refuse those who wait for a version that will never be published, as far as they may know."""
    current = 0 if pool.current is None else pool.current.number
    for reader in tuple(pool.readers):
        if 0 < reader.body.version <= pool.last:
            if may_hear(books, reader.session, pool):
                words = wording.retired(pool.name, reader.body.version, current, pool.loss)
                waiting.refuse(books, reader, Retired(words))
            else:
                reader.blind = True


def resumed(books: Books) -> None:
    """Have teams put together that went with the broker before, and tell watchers what they may have missed."""
    if books.resumed:
        raise Impossible("a ledger that was not restored, or goes on already, is to go on")
    books.resumed = True
    for session in books.sessions.values():
        session.story.append(AGAIN)
    for pool in books.pools.values():
        pool.story.append(AGAIN)
        _resume(books, pool)


def _resume(books: Books, pool: Pool) -> None:
    for version in tuple(pool.versions.values()):  # other rules may have kept more, and a mistake anything
        end_if_empty(books, version)
    for version in pool.versions.values():
        if version.state is State.LOST:
            _tell(books, version)  # again, if it was lost before: the broker that was to say so may have ended first
        else:
            teams.assemble(books, version)
    publishing.announce(books, pool)
