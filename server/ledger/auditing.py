"""What became of the books after a mistake: what in them does not agree any more, and what that costs later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cubroker.server.ledger import invariants, record, restoring
from cubroker.server.ledger.books import Books
from cubroker.server.store.damaged import Damaged


class Audit(NamedTuple):
    """What in the books does not agree; and what the next broker would give up, if it found the record as it is now.

    ``refused``: why it would refuse all of it.
    """

    disagreements: Sequence[str]
    given_up: Sequence[str]
    refused: str


def audit(books: Books) -> Audit:
    """Look at everything; costs time in proportion to all that there is."""
    disagreements = invariants.disagreements(books)
    if books.store is None:
        return Audit(disagreements, (), "")
    devices = [account.device for account in books.accounts.values()]
    later = Books(devices, books.uid, books.limits, books.policy, books.store)
    try:
        restoring.restore(later, record.whole(books).items())
    except Damaged as error:
        return Audit(disagreements, (), str(error))
    return Audit(disagreements, later.findings, "")
