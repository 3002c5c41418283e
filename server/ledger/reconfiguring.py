"""New rules for a ledger that has records: what is held stays, however much that is, and what is asked now obeys them.

A budget, a quota or a limit that became smaller ends nothing; it only grants nothing until enough has ended by itself.
A larger one serves those who waited for it. Who waits for what there will never be is refused.
"""

from __future__ import annotations

from dataclasses import replace

from cubroker.protocol.errors import OverQuota
from cubroker.server.ledger import shortages
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import User
from cubroker.server.ledger.events import Reconfigured
from cubroker.server.ledger.leases import end_surplus
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.waiters import Phase, Writer
from cubroker.server.ledger.waiting import come_back, refuse


def reconfigure(books: Books, event: Reconfigured) -> None:
    """Put new rules in force."""
    assert event.budgets.keys() == books.accounts.keys(), "budgets of other devices"
    tolerate(books)
    books.policy, books.limits = event.policy, event.limits
    for uuid, account in books.accounts.items():
        account.device = replace(account.device, budget=event.budgets[uuid])
        books.stirred_accounts[account] = None
    for user in tuple(books.users.values()):
        user.quota = event.policy.quota_of(user.uid)
        _call_back(books, user)
        _refuse_for_good(books, user)
    for pool in books.pools.values():
        end_surplus(books, pool)


def tolerate(books: Books) -> None:
    """Accept all that is held, whatever the rules say: these may be smaller now than when it was granted."""
    for account in (*books.accounts.values(), *books.absent.values()):
        account.tolerated = account.allocated + account.promised
    for user in books.users.values():
        user.tolerated = user.used
    for session in books.sessions.values():
        session.tolerated = session.used


def _call_back(books: Books, user: User) -> None:
    """Have those who stepped aside for the old quota offered their turn again: the new one may have room, or no end."""
    for writer in tuple(user.line):
        come_back(books, writer)
        books.stirred_pools[writer.pool] = None


def _refuse_for_good(books: Books, user: User) -> None:
    """Refuse the creates that wait for their turn and can never have the memory, now that the quota is this."""
    waiters = [waiter for session in user.sessions.values() for waiter in session.unfinished.values()]
    for writer in waiters:
        if isinstance(writer, Writer) and writer.phase is Phase.TURN and exceeds(0, writer.total, user.quota.memory):
            refuse(books, writer, OverQuota(shortages.never_affords(user, writer.pool.name, writer.total)))
