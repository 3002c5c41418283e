"""Who may do what with a pool: the one place where that is decided.

A pool has an owner, a group and a mode, as a file has. Reading is attaching, describing and watching;
writing is publishing and retiring. Of the mode's three classes the first that a user belongs to
counts: its group's for a member of the group, else the one for others; execution means nothing. Its
owner may do both whatever the mode says, so that nobody can lock away memory that is nobody else's to free.
"""

from __future__ import annotations

from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Past, Pool, Session

ROOT = 0
READ, WRITE = 4, 2


def is_privileged(books: Books, session: Session) -> bool:
    """Say whether a session's user administers the broker."""
    return administers(books, session.uid, verified=session.verified)


def administers(books: Books, uid: int, *, verified: bool) -> bool:
    """Say whether a user may do everything.

    Users whom the operator listed may, by their number alone. Root and the broker's own user may where the process is
    ``verified``: containers choose these numbers for themselves.
    """
    if uid in books.policy.admins:
        return True
    return verified and (uid == books.uid or (uid == ROOT and books.policy.trust_root))


def may_read(books: Books, session: Session, pool: Pool) -> bool:
    """Say whether a session may attach to, describe and watch a pool; anybody may if nothing of it lives."""
    return _allows(session, pool, READ) or may_rule(books, session, pool)


def may_write(books: Books, session: Session, pool: Pool) -> bool:
    """Say whether a session may publish and retire versions of a pool; anybody may if nothing of it lives."""
    return _allows(session, pool, WRITE) or may_rule(books, session, pool)


def reservation(books: Books, session: Session, name: str) -> str | None:
    """Return the prefix by which a name is reserved for others, None if a session may publish it as far as that goes.

    Of several prefixes the longest counts.
    """
    prefix = max((each for each in books.policy.reserved if name.startswith(each)), key=len, default=None)
    if prefix is None or is_privileged(books, session):
        return None
    allowed = books.policy.reserved[prefix]
    member = session.uid in allowed.users or not allowed.groups.isdisjoint((session.gid, *session.groups))
    return None if member else prefix


def may_rule(books: Books, session: Session, pool: Pool) -> bool:
    """Say whether a session may change the mode of a pool, as its owner may."""
    return pool.owner in (None, session.uid) or is_privileged(books, session)


def may_hear(books: Books, session: Session, pool: Pool | Past) -> bool:
    """Say whether a session may hear what happened to a pool: as may read it, or might when something of it lived.

    Of a pool of which nobody knows whose it was, administrators alone may.
    """
    if isinstance(pool, Pool) and pool.owner is not None:
        return may_read(books, session, pool)
    known = pool.heir is not None and (pool.heir == session.uid or _allows(session, pool, READ))
    return known or is_privileged(books, session)


def may_see(books: Books, session: Session, other: Session) -> bool:
    """Say whether a session may know of another one, and of its requests: of its own user's, or as administrator."""
    return other.uid == session.uid or is_privileged(books, session)


def heard(books: Books, session: Session, name: str) -> Past:
    """Return what a session may know of the past of a name: of a pool that it may not read no more than of none."""
    pool = books.pools.get(name)
    past = books.past(name)
    return past if may_hear(books, session, past if pool is None else pool) else Past()


def _allows(session: Session, pool: Pool | Past, bit: int) -> bool:
    """Say whether a pool's mode has a bit for a session that is not its owner's."""
    member = pool.group == session.gid or pool.group in session.groups
    return bool(pool.mode >> (3 if member else 0) & bit)
