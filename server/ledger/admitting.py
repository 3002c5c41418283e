"""Whether somebody may open a session: as long as there is room, in the user's quota and in the store."""

from __future__ import annotations

from cubroker.protocol.errors import OverQuota
from cubroker.server.ledger import shortages
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import SESSION
from cubroker.server.ledger.permissions import administers
from cubroker.server.ledger.policy import exceeds, held_back


def refusal(books: Books, uid: int, *, verified: bool) -> OverQuota | None:
    """Return why a user may open no session now, None if it may."""
    user, quota = books.users.get(uid), books.policy.quota_of(uid)
    if exceeds(len(user.sessions) if user else 0, 1, quota.sessions):
        return OverQuota(shortages.too_many_sessions(uid, quota.sessions, user))
    if exceeds(user.descriptors if user else 0, SESSION, quota.descriptors):
        return OverQuota(shortages.too_many_descriptors(uid, SESSION, quota.descriptors, user))
    reserve = 0 if administers(books, uid, verified=verified) else held_back(books.store)
    if exceeds(books.stored + reserve, SESSION, books.store):
        return OverQuota(shortages.store_is_full(books, SESSION, reserve))
    return None
