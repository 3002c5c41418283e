"""Access: who may do what with a pool. Only this module decides that.

A pool has an owner, a group and a mode, like a file. Reading is attaching, describing and watching; writing is
publishing and retiring. The mode's group bits count for members of the group, and its other bits for all other users;
execute bits mean nothing. The owner may read and write with any mode, so that its memory can always be released.
"""

from __future__ import annotations

from cubroker.server.ledger.records import Past, Pool, Session, Version
from cubroker.server.ledger.tables import Tables

ROOT = 0
READ, WRITE = 4, 2


def is_privileged(tables: Tables, session: Session) -> bool:
    """Whether a session's user administers the broker."""
    return is_admin(tables, session.uid, verified=session.verified)


def is_admin(tables: Tables, uid: int, *, verified: bool) -> bool:
    """Whether a user may do everything.

    Listed administrators may, by their uid alone. Root and the broker's own user may only if the process is
    ``verified``, since containers choose these uids for themselves.
    """
    if uid in tables.policy.admins:
        return True
    return verified and (uid == tables.uid or (uid == ROOT and tables.policy.trust_root))


def can_read(tables: Tables, session: Session, pool: Pool) -> bool:
    """Whether a session may attach to, describe and watch a pool; every session may if the pool has no version."""
    return _allows(session, pool, READ) or can_administer(tables, session, pool)


def can_read_draft(tables: Tables, session: Session, draft: Version) -> bool:
    """Whether a session may attach to a draft: it can read the pool now, and still can once the draft is published."""
    pool = draft.pool
    published = Past(group=pool.group, mode=pool.mode if draft.mode is None else draft.mode)
    return can_administer(tables, session, pool) or (_allows(session, pool, READ) and _allows(session, published, READ))


def can_publish(tables: Tables, session: Session, pool: Pool) -> bool:
    """Whether a session may publish and retire versions of a pool; every session may if the pool has no version."""
    return _allows(session, pool, WRITE) or can_administer(tables, session, pool)


def reserved_prefix(tables: Tables, session: Session, name: str) -> str | None:
    """Return the prefix that reserves a name for others; None if the session may publish it.

    The longest matching prefix counts.
    """
    prefix = max((each for each in tables.policy.reserved if name.startswith(each)), key=len, default=None)
    if prefix is None or is_privileged(tables, session):
        return None
    allowed = tables.policy.reserved[prefix]
    member = session.uid in allowed.users or not allowed.groups.isdisjoint((session.gid, *session.groups))
    return None if member else prefix


def can_administer(tables: Tables, session: Session, pool: Pool) -> bool:
    """Whether a session may change the mode of a pool: its owner, or an administrator."""
    return pool.owner in (None, session.uid) or is_privileged(tables, session)


def can_read_history(tables: Tables, session: Session, pool: Pool | Past) -> bool:
    """Whether a session may read a pool's history: it can read the pool, or could while a version of it lived.

    If the last owner is not known, only administrators may.
    """
    if isinstance(pool, Pool) and pool.owner is not None:
        return can_read(tables, session, pool)
    known = pool.previous_owner is not None and (pool.previous_owner == session.uid or _allows(session, pool, READ))
    return known or is_privileged(tables, session)


def can_see_session(tables: Tables, session: Session, other: Session) -> bool:
    """Whether a session may see another one and its requests: they have the same user, or the first is privileged."""
    return other.uid == session.uid or is_privileged(tables, session)


def visible_past(tables: Tables, session: Session, name: str) -> Past:
    """Return the past of a name, or an empty past if the session may not read the history of its pool."""
    pool = tables.pools.get(name)
    past = tables.past(name)
    return past if can_read_history(tables, session, past if pool is None else pool) else Past()


def _allows(session: Session, pool: Pool | Past, bit: int) -> bool:
    """Whether a pool's mode has a bit for a session of another user."""
    member = pool.group == session.gid or pool.group in session.groups
    return bool(pool.mode >> (3 if member else 0) & bit)
