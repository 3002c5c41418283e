"""A broker whose ledger makes a mistake: it fails half-way over the seal of version 2 of a pool named ``mistake``."""

from __future__ import annotations

import sys

from cubroker.server.__main__ import main
from cubroker.server.ledger import leases
from cubroker.server.ledger.records import Lease
from cubroker.server.ledger.tables import Tables

release = leases.release


def fail(tables: Tables, lease: Lease) -> None:
    """Release a lease, but that one not at its seal, which comes first."""
    if lease.version.label == "mistake@2":
        vars(leases)["release"] = release
        raise ZeroDivisionError("a mistake")
    release(tables, lease)


if __name__ == "__main__":
    vars(leases)["release"] = fail
    sys.exit(main())
