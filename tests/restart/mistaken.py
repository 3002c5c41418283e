"""A broker whose ledger makes a mistake: it fails half-way over the seal of version 2 of a pool named ``mistake``."""

from __future__ import annotations

import sys

from cubroker.server.__main__ import main
from cubroker.server.ledger import publishing
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Lease

release = publishing.release


def fail(books: Books, lease: Lease) -> None:
    """Release a lease, but that one."""
    if lease.version.label == "mistake@2":
        raise ZeroDivisionError("a mistake")
    release(books, lease)


if __name__ == "__main__":
    vars(publishing)["release"] = fail
    sys.exit(main())
