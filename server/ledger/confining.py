"""What to do about a record that contradicts itself: the one thing that contradicts the rest is given up, by name.

A ledger that made a mistake over one event, and was interrupted half-way, records what it has: a lease without its
session, two current versions. Each is a value that a ledger writes; they cannot all be true. Then

- a lease, an event, a watch or a state that refers to what there is not is forgotten: nobody could give it back;
- a version whose state contradicts its leases, its name or other versions of that is *lost*, as if its memory had
  gone: nobody gets it any more, its holders are told, and its memory is freed with its last lease;
- a version that nobody keeps, and a session that has no connection and no lease, end when the ledger goes on.

Of several current versions the name says which one was published last, and that one stays.
"""

from __future__ import annotations

from cubroker.server.ledger.books import Books, Kind, Mark
from cubroker.server.ledger.entries import Loss, Pool, Version
from cubroker.server.ledger.leases import FABRIC, opened_by
from cubroker.server.ledger.states import State

WHY = "what the broker had written down of it contradicted itself"
"""What holders read of a version that was given up; the log has the rest."""


def forget(books: Books, mark: Mark, what: str) -> None:
    """Leave out what cannot be put where it belongs."""
    books.mark(*mark)
    books.findings.append(f"forgotten is {what}")


def lose(books: Books, version: Version, why: str) -> None:
    """Give a version up, with its memory, which stays as long as somebody holds it; nothing the second time."""
    if (version.state, version.why) == (State.LOST, WHY):
        return
    pool = version.pool
    books.findings.append(f"{version.label} is lost: {why}")
    version.state, version.why = State.LOST, WHY
    pool.remember(Loss(version.number, WHY))
    books.mark(Kind.STATE, version.number, pool.name)
    books.mark(Kind.NAME, name=pool.name)


def confine(books: Books) -> None:
    """Give up whatever contradicts the rest of books that were filled out of a record."""
    for pool in tuple(books.pools.values()):
        _owner(books, pool)
        for version in pool.versions.values():
            _version(books, version)
        _numbers(books, pool)
        _current(books, pool)
        if pool.idle:
            books.forget(pool)


def _owner(books: Books, pool: Pool) -> None:
    """Have a name belong to somebody as long as there is a version of it, and no longer."""
    if pool.owner is not None and not pool.versions:
        books.findings.append(f"{pool.name} belongs to nobody any more: there is no version of it")
        pool.owner = None
        books.mark(Kind.NAME, name=pool.name)
    elif pool.owner is None and pool.versions:
        for version in pool.versions.values():
            lose(books, version, "nothing says whose its name is")
        pool.owner, pool.group, pool.mode = version.owner, 0, 0


def _version(books: Books, version: Version) -> None:
    """Lose a version that contradicts itself or its leases."""
    if version.state is State.ALLOCATING:
        lose(books, version, "nothing says what became of it")
    elif version.state is State.LOST and not version.why:
        lose(books, version, "nothing says how")
    elif version.state is State.DRAFT and version.leases != 1:
        lose(books, version, f"it is a draft, whose writer has the only lease, and there are {version.leases}")
    unsent = [lease for lease in version.holders.values() if lease.unsent]
    if opened_by(version) != FABRIC:
        for lease in unsent:
            lose(books, version, f"lease {lease.id} got fabric handles, and it has none")
            lease.unsent = False
            books.mark(Kind.LEASE, lease.id)


def _numbers(books: Books, pool: Pool) -> None:
    """Have one draft at most, which is the next after the last version; and nothing else there."""
    beyond = [version for version in pool.versions.values() if version.number > pool.last]
    if [(version.number, version.state) for version in beyond] == [(pool.last + 1, State.DRAFT)]:
        pool.draft = beyond.pop()
    for version in pool.versions.values():
        if version.state is State.DRAFT and version is not pool.draft:
            lose(books, version, f"it is a draft, and not the only one, or not the next after version {pool.last}")
    for version in beyond:
        lose(books, version, f"it is no draft, and {pool.last} was the last one that was published")
        pool.last = max(pool.last, version.number)  # which somebody may know already, so nobody else gets it
        books.mark(Kind.NAME, name=pool.name)


def _current(books: Books, pool: Pool) -> None:
    """Have one current version at most."""
    current = [version for version in pool.versions.values() if version.state is State.CURRENT]
    if len(current) > 1:
        for version in current:
            if version.number != pool.last:
                lose(books, version, f"{len(current)} versions are current, and {pool.last} was published last")
    pool.current = next((version for version in current if version.state is State.CURRENT), None)
